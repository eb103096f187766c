// A rank's connections in use: messages with all peers at once, departures, deadlines.
#pragma once

#include <poll.h>
#include <sys/types.h>

#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "comm/network/frame.h"
#include "comm/network/links.h"
#include "megamoe/communicator.h"
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
  /// Whether exchange() or throw_if_left() has thrown a peer's departure or a missed deadline.
  [[nodiscard]] bool has_failed() const { return failure_.has_value(); }

  /// Sends and receives all of it, at most one message to and one from a peer. Throws peer_failed
  /// naming a peer that has left before its part was done, deadline_exceeded naming those that are
  /// missing; then, and ever after.
  void exchange(std::span<const Outgoing> outgoing, std::span<Incoming> incoming, const char* what,
                double deadline_s);
  /// As Communicator::departures(); the only member that other threads may call.
  [[nodiscard]] std::vector<Departure> departures();
  /// Throws what exchange() throws where a peer has left, now and ever after.
  void throw_if_left(const char* what);
  /// Tells all peers why this rank takes no further part. The first reason given stays.
  void leave(const std::string& reason) noexcept;

 private:
  /// How a rank leaves, as it tells its peers; `broken` where it missed a deadline, which breaks
  /// the group for all.
  enum class LeaveKind : std::int32_t { none, left, broken };
  struct Leave {
    LeaveKind kind = LeaveKind::none;
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
  [[nodiscard]] std::string while_waiting_for(const char* what) const;
  void throw_if_failed() const;
  /// Fails where a peer has broken the group.
  void throw_if_broken();
  void send_leave(LeaveKind kind, const std::string& reason) noexcept;

  // With leaves_mutex_ held:
  /// Reads what peers have said by now. Returns one that has broken the group, else -1.
  int look_for_leaves();
  const Leave& leave_of(int peer, double wait_s);

  std::vector<Link> links_;
  int rank_;
  std::vector<Traffic> traffic_R_;
  std::vector<short> events_R_;  ///< what poll() has said of each peer
  std::vector<pollfd> polled_;
  std::vector<int> polled_peers_;
  bool has_left_ = false;
  pid_t process_;  ///< that the rank is

  std::mutex leaves_mutex_;
  std::vector<Leave> leaves_R_;
  std::vector<int> left_;  ///< peers that have left, in the order in which it was seen
  std::vector<pollfd> asked_;
  std::vector<int> asked_peers_;
  std::optional<Error> failure_;  ///< of an exchange; the group is over. Set by the rank's thread
};

}  // namespace megamoe::network
