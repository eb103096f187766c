// Hosts joined by NCCL's send and receive, on whatever network it works on.
#pragma once

#include <nccl.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "comm/cuda/host_link.h"
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
  using Clock = std::chrono::steady_clock;

  struct Transfer {
    cudaEvent_t may_begin = nullptr;
    cudaEvent_t is_over = nullptr;
    const char* what = nullptr;
    double deadline_s = 0.0;
    std::vector<int> hosts;  ///< that take part
    std::optional<Clock::time_point> began;
    std::optional<Clock::time_point> lost_peer;  ///< when one of them was seen to have left
  };

  // All of these with the mutex held.
  void send_and_receive(std::span<const cuda::HostMessage> sends,
                        std::span<const cuda::HostMessage> receives, const char* what,
                        double deadline_s, cudaStream_t stream);
  /// Waits until NCCL has done on the host what it was asked for.
  void settle(const char* what, double deadline_s);
  /// Connects to all hosts and measures the link.
  void connect(double deadline_s);
  /// Of the construction, which nobody watches: ends the link where a peer has left.
  void end_if_a_peer_left(const char* what);
  /// Sends `bytes` to every host, which does the same, and waits; returns the seconds.
  double greet(const cuda::DeviceMemory& memory, std::int64_t bytes, double deadline_s);
  Transfer take_transfer();
  void look();
  void end(const Error& why) noexcept;
  void throw_if_over() const;

  void watch();
  /// Those of them whose ranks, this one's peers, have left.
  [[nodiscard]] std::vector<int> left_among(const std::vector<int>& hosts) const;
  /// "rank 3", "ranks 3, 5": this rank's peers on these hosts.
  [[nodiscard]] std::string peers_on(const std::vector<int>& hosts) const;
  [[nodiscard]] std::vector<int> other_hosts() const;

  Topology topology_;
  int rank_;
  int device_ = 0;
  int max_ctas_;
  double bytes_per_s_ = 0.0;
  const std::uint32_t* has_left_R_;
  std::mutex mutex_;
  std::condition_variable wake_;
  ncclComm_t comm_ = nullptr;
  std::optional<Error> failure_;
  std::optional<Clock::time_point> lost_peer_;  ///< in the construction
  std::deque<Transfer> pending_;
  std::vector<Transfer> spare_;
  bool is_ending_ = false;
  std::thread watcher_;
};

}  // namespace megamoe::nccl
