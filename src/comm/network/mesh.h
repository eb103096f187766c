// A rank's connections in use: messages with all peers at once, departures, deadlines.
#pragma once

#include <poll.h>

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "comm/network/frame.h"
#include "comm/network/links.h"
#include "megamoe/error.h"

namespace megamoe::network {

struct Outgoing {
  int peer = 0;
  MeetingPurpose purpose;
  std::span<const RowSegment> payload;
};

/// The payload is written only if the peer's message has the same purpose and size.
struct Incoming {
  int peer = 0;
  MeetingPurpose purpose;  ///< what is expected; afterwards what came
  std::span<const RowSegment> payload;
};

class Mesh {
 public:
  Mesh(std::vector<Link> links, int rank);
  Mesh(const Mesh&) = delete;
  Mesh& operator=(const Mesh&) = delete;
  ~Mesh();

  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] int size() const { return static_cast<int>(links_.size()); }

  /// Sends and receives all of it, at most one message to and one from a peer. Throws peer_failed
  /// naming a peer that has left before its part was done, deadline_exceeded naming those that are
  /// missing; then, and ever after.
  void exchange(std::span<const Outgoing> outgoing, std::span<Incoming> incoming, const char* what,
                double deadline_s);
  /// Throws peer_failed where a peer has left, or what an exchange has thrown.
  void throw_if_peer_left();
  /// Tells all peers why this rank takes no further part. The first reason given stays.
  void leave(const std::string& reason) noexcept;

 private:
  /// How a peer left; `broken` where it missed a deadline, which breaks the group for all.
  enum class DepartureKind : std::int32_t { none, left, broken };
  struct Departure {
    DepartureKind kind = DepartureKind::none;
    std::array<char, 508> reason{};
  };

  /// Messages in progress with a peer.
  struct Traffic {
    std::optional<FrameWriter> writer;
    std::optional<FrameReader> reader;
    Incoming* incoming = nullptr;
    [[nodiscard]] bool is_over() const { return !writer && !reader; }
  };

  void advance(int peer, const char* what);
  /// Waits for any peer with traffic and fills events_R_.
  void wait(const Deadline& deadline, const char* what);
  [[noreturn]] void miss_deadline(const Deadline& deadline, const char* what);
  [[noreturn]] void fail(ErrorCode code, const std::string& reason);
  [[noreturn]] void fail_because_of(int peer, const std::string& while_what);
  void throw_if_failed() const;
  /// Reads what peers have said by now; fails where one has broken the group.
  void look_for_departures();
  const Departure& departure_of(int peer, double wait_s);
  void send_departure(DepartureKind kind, const std::string& reason) noexcept;

  std::vector<Link> links_;
  int rank_;
  std::vector<Traffic> traffic_R_;
  std::vector<short> events_R_;  ///< what poll() has said of each peer
  std::vector<pollfd> polled_;
  std::vector<int> polled_peers_;
  std::vector<Departure> departures_R_;
  std::optional<Error> failure_;  ///< of an exchange; the group is over
  bool has_left_ = false;
};

}  // namespace megamoe::network
