// Hosts that are stand-ins, threads of one process: messages are copies from memory to memory.
#pragma once

#include <array>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "comm/cuda/host_link.h"
#include "megamoe/topology.h"

namespace megamoe::cuda {

/// What the ranks with one index, of all hosts, share.
class StandInNetwork {
 public:
  explicit StandInNetwork(int num_hosts)
      : boxes_(static_cast<std::size_t>(num_hosts) * num_hosts) {}

 private:
  friend class StandInLink;
  struct Letter {
    const std::byte* data;
    std::int64_t bytes;
    cudaEvent_t is_written;
  };
  /// From one host to another. At most one message is on its way.
  struct Box {
    std::deque<Letter> letters;
    std::deque<cudaEvent_t> copies;  ///< of letters that have been read: their events
  };

  std::mutex mutex_;
  std::condition_variable news_;
  std::vector<Box> boxes_;  ///< [from, to]
  std::optional<Error> failure_;
};

class StandInLink final : public HostLink {
 public:
  /// On the current device, until after the calls that use it are done; `devices_R` are all ranks'.
  /// `has_left_R` are the words of this rank's PeerWatch. Throws Error(unsupported) where it cannot
  /// load from a peer's device.
  StandInLink(std::shared_ptr<StandInNetwork> network, const Topology& topology, int rank,
              std::span<const int> devices_R, const std::uint32_t* has_left_R);

  /// Waits on the host until the other ends have made the same call.
  void exchange(std::span<const HostMessage> sends, std::span<const HostMessage> receives,
                const char* what, double deadline_s, cudaStream_t stream) override;
  std::optional<Error> failure() override;
  void fail(const Error& why) noexcept override;
  [[nodiscard]] int num_sms() const override { return 0; }
  [[nodiscard]] double bytes_per_s() const override { return 0.0; }

 private:
  /// Of messages with one host. A host is at most one message ahead of another.
  struct Events {
    std::array<OwnedEvent, 2> is_written;
    std::array<OwnedEvent, 2> is_copied;
    std::size_t num_sent = 0;
    std::size_t num_received = 0;
  };

  [[nodiscard]] StandInNetwork::Box& box(int from, int to) {
    return network_->boxes_[from * topology_.num_hosts() + to];
  }
  /// Waits for news until `holds`; throws where the network fails, the peer on `host` leaves or the
  /// deadline passes.
  template <class Condition>
  void await(std::unique_lock<std::mutex>& lock, int host, const char* what, double deadline_s,
             Condition holds);
  void end(const Error& why);

  std::shared_ptr<StandInNetwork> network_;
  Topology topology_;
  int rank_;
  int own_host_;
  const std::uint32_t* has_left_R_;
  std::vector<Events> events_S_;
};

}  // namespace megamoe::cuda
