// A rendezvous of all ranks between two kernels of a call.
#include "kernels/await_peers.cuh"
#include "kernels/exchange/exchange.h"
#include "kernels/launch.h"

namespace megamoe::gpu {
namespace {

constexpr int kMeetThreads = 96;
static_assert(kMaxRanks <= kMeetThreads);

/// A call that failed at its entry has failed on every rank: nobody waits for anybody. A rank that
/// failed for good says so instead of waiting.
__global__ __launch_bounds__(kMeetThreads) void meet_kernel(const __grid_constant__ RankView view,
                                                            std::byte* plan,
                                                            const device::Signal what) {
  const std::uint64_t epoch = view.control()->epoch;
  const bool failed = view.control()->call_failed != 0;
  signal_peers(view, what);
  if (failed || !await_peers(view, what, epoch, view.inner_deadline_ns)) write_no_rows(view, plan);
}

__global__ __launch_bounds__(kMeetThreads) void announce_kernel(
    const __grid_constant__ RankView view, const device::Signal what) {
  signal_peers(view, what);
}

}  // namespace

void announce(const RankView& view, device::Signal what, cudaStream_t stream) {
  announce_kernel<<<1, kMeetThreads, 0, stream>>>(view, what);
  check_launch("announce");
}

void meet(const RankView& view, std::byte* plan, device::Signal what, cudaStream_t stream) {
  meet_kernel<<<1, kMeetThreads, 0, stream>>>(view, plan, what);
  check_launch("meet");
}

void load_meet_kernels() {
  load_kernel(reinterpret_cast<const void*>(&meet_kernel));
  load_kernel(reinterpret_cast<const void*>(&announce_kernel));
}

}  // namespace megamoe::gpu
