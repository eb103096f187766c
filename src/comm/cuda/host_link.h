// How a rank on a CUDA device reaches the ranks with its own index on other hosts: messages in
// device memory, in stream order.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "cuda/runtime.h"
#include "megamoe/error.h"

namespace megamoe::cuda {

/// Device memory to be sent to a host, or to be filled from there.
struct HostMessage {
  int host = 0;
  std::byte* data = nullptr;
  std::int64_t bytes = 0;
};

class HostLink {
 public:
  HostLink() = default;
  HostLink(const HostLink&) = delete;
  HostLink& operator=(const HostLink&) = delete;
  virtual ~HostLink() = default;

  /// Enqueues all of it on `stream`; at most one message to and one from each host. The other ends
  /// make the same calls in the same order, with equal sizes: callers have agreed on them. Where
  /// the transfer has begun and is not over after `deadline_s`, or a peer has gone, the link fails,
  /// also while nobody calls it: what the stream holds goes on without the data. Throws what
  /// failure() returns. `what` must stay.
  virtual void exchange(std::span<const HostMessage> sends, std::span<const HostMessage> receives,
                        const char* what, double deadline_s, cudaStream_t stream) = 0;
  /// Why the link is over; nothing while it works. From any thread.
  [[nodiscard]] virtual std::optional<Error> failure() = 0;
  /// Ends the link, unless it is over already. From any thread.
  virtual void fail(const Error& why) noexcept = 0;
  /// What devices read: not 0 once the link is over, before any transfer ends without its data.
  [[nodiscard]] const std::uint32_t* is_over() const { return is_over_.get(); }
  /// Multiprocessors that a transfer occupies while it runs; 0 where copy engines do it.
  [[nodiscard]] virtual int num_sms() const = 0;
  /// Of large messages, each way, measured when the link was made; 0: unknown.
  [[nodiscard]] virtual double bytes_per_s() const = 0;

 protected:
  void set_over() noexcept { std::atomic_ref(*is_over_.get()).store(1, std::memory_order_seq_cst); }

 private:
  HostWords is_over_{1};
};

/// A link and how calls use it.
struct HostConnection {
  HostLink* link = nullptr;  ///< null on one host; valid as long as the communicator
  int num_groups = 0;        ///< of experts, that a call is cut into; 0: as the cost model says
  double bytes_per_s = 0.0;  ///< of the slowest rank's link
};

}  // namespace megamoe::cuda
