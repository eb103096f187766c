// Hosts joined by NCCL's send and receive, on whatever network it works on.
#pragma once

#include <nccl.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "comm/cuda/host_link.h"
#include "comm/cuda/nccl_communicator.h"
#include "cuda/runtime.h"
#include "megamoe/topology.h"

namespace megamoe::nccl {

/// One rank's end. NCCL's kernels know no deadlines, so a thread watches transfers, and aborts the
/// communicator where one fails or takes too long.
class NcclLink final : public cuda::HostLink {
 public:
  /// Joins the ranks with the index of `rank`, one a host, on the current device, and connects to
  /// all of them: later transfers allocate nothing. Collective among them. `max_ctas` bounds the
  /// CTAs of a transfer; `has_left_R` are the words of the rank's PeerWatch. Throws Error.
  NcclLink(const ncclUniqueId& id, const Topology& topology, int rank, int max_ctas,
           const std::uint32_t* has_left_R, double deadline_s);
  /// After the calls that use it are done.
  ~NcclLink() override;

  void exchange(std::span<const cuda::HostMessage> sends,
                std::span<const cuda::HostMessage> receives, const char* what, double deadline_s,
                cudaStream_t stream) override;
  std::optional<Error> failure() override;
  void fail(const Error& why) noexcept override;
  [[nodiscard]] int num_sms() const override { return max_ctas_; }
  [[nodiscard]] double bytes_per_s() const override { return bytes_per_s_; }

 private:
  struct Transfer {
    cuda::OwnedEvent may_begin;
    cuda::OwnedEvent is_over;
    Wait wait;
  };

  // All of these with the mutex held, or in the construction.
  void send_and_receive(std::span<const cuda::HostMessage> sends,
                        std::span<const cuda::HostMessage> receives, const char* what,
                        double deadline_s, cudaStream_t stream);
  /// Connects to all hosts and measures the link.
  void connect(double deadline_s);
  /// Sends `bytes` to every host, which does the same, and waits; returns the seconds.
  double greet(const cuda::DeviceMemory& memory, std::int64_t bytes, double deadline_s);
  /// For the senders of `messages`.
  void set(Wait& wait, std::span<const cuda::HostMessage> messages, const char* what,
           double deadline_s) const;
  Transfer take_transfer();
  void look();
  void end(const Error& why) noexcept;
  void throw_if_over() const;

  void watch();

  int own_host_;
  int device_ = 0;
  int max_ctas_;
  double bytes_per_s_ = 0.0;
  std::mutex mutex_;
  std::condition_variable wake_;
  NcclCommunicator communicator_;
  std::optional<Error> failure_;
  std::deque<Transfer> pending_;
  std::vector<Transfer> spare_;
  bool is_ending_ = false;
  std::thread watcher_;
};

}  // namespace megamoe::nccl
