// Telling peers and waiting for them, by all threads of a kernel's only CTA.
#pragma once

#include <climits>
#include <cstdint>

#include "device/rank_signals.cuh"
#include "kernels/rank_view.h"

namespace megamoe::gpu {

/// Sends `what` to every rank, the own one too. A CTA barrier has ordered what it announces.
__device__ inline void signal_peers(const RankView& view, device::Signal what) {
  const int peer = static_cast<int>(threadIdx.x);
  if (peer >= view.routing().num_ranks) return;
  device::store_release_sys(view.signal(what, peer, view.rank),
                            device::signal_value(*view.control()));
}

/// If any thread has a failure, the lowest such thread reports its own (with `record`) and fails
/// the call. Returns whether there was one, the same in all threads.
__device__ inline bool fail_call(const RankView& view, const device::FailureRecord& failure,
                                 bool record = true) {
  __shared__ int lowest;
  const int thread = static_cast<int>(threadIdx.x);
  __syncthreads();
  if (thread == 0) lowest = INT_MAX;
  __syncthreads();
  if (failure.code != device::FailureCode::none) atomicMin(&lowest, thread);
  __syncthreads();
  if (lowest == INT_MAX) return false;
  if (thread == lowest) {
    if (record) device::report(view.failure, failure);
    view.control()->call_failed = 1;
    if (device::is_fatal(failure.code)) view.control()->failed_for_good = 1;
  }
  __syncthreads();
  return true;
}

/// Waits until every rank has sent `what` in call `epoch`. Returns false, and has failed the call,
/// where one did not or has failed for good.
__device__ inline bool await_peers(const RankView& view, device::Signal what, std::uint64_t epoch,
                                   std::uint64_t deadline_ns) {
  const int peer = static_cast<int>(threadIdx.x);
  device::FailureRecord failure{};
  if (peer < view.routing().num_ranks) {
    const std::uint32_t* has_left = view.has_left_R == nullptr ? nullptr : view.has_left_R + peer;
    const device::Arrival arrival =
        device::await_signal(view.signal(what, view.rank, peer), epoch, deadline_ns, has_left);
    failure.code = arrival.failure;
    failure.rank = view.rank;
    failure.peer = peer;
    failure.awaited = what;
    failure.expected = epoch;
    failure.seen = device::epoch_of(arrival.seen);
  }
  return !fail_call(view, failure);
}

/// So that the products of a failed call find no rows.
__device__ inline void write_no_rows(const RankView& view, std::byte* plan) {
  const int num_local = view.routing().experts_per_rank();
  for (int i = static_cast<int>(threadIdx.x); i <= num_local; i += static_cast<int>(blockDim.x)) {
    view.plan_layout.expert_begin.in(plan)[i] = 0;
    if (i == num_local) continue;
    view.plan_layout.group_begin_e.in(plan)[i] = 0;
    view.plan_layout.group_count_e.in(plan)[i] = 0;
  }
}

}  // namespace megamoe::gpu
