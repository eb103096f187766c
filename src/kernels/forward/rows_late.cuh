// Waiting for rows that this rank's own pull warps fetch, with a deadline: on a missed one the call
// fails for good, and who waited goes on with whatever is there.
#pragma once

#include <cstdint>

#include "device/flags.cuh"
#include "device/rank_signals.cuh"
#include "kernels/rank_view.h"

namespace megamoe::gpu {

/// Under which of CallControl's sums a wait is counted.
enum class Wait { start, later };

/// The first thread to fail the call reports.
__device__ inline void fail_rows_late(const RankView& view, int first_row, std::uint32_t expected,
                                      std::uint32_t seen) {
  device::CallControl* control = view.control();
  if (atomicExch(&control->call_failed, 1U) != 0) return;
  control->failed_for_good = 1;
  device::FailureRecord failure{};
  failure.code = device::FailureCode::rows_late;
  failure.rank = view.rank;
  failure.peer = view.rank;
  failure.value = first_row;
  failure.expected = expected;
  failure.seen = seen;
  device::report(view.failure, failure);
}

/// Until `seen()`, which acquires a counter, has reached `expected`, or another wait has failed the
/// call. Returns whether it has.
template <class Seen>
__device__ inline bool await_rows(const RankView& view, Wait kind, int first_row,
                                  std::uint32_t expected, const Seen& seen) {
  if (seen() >= expected) return true;
  device::CallControl* control = view.control();
  const volatile std::uint32_t& call_failed = control->call_failed;
  const std::uint64_t start = device::now_ns();
  while (seen() < expected) {
    if (call_failed != 0) return false;
    if (device::now_ns() - start > view.inner_deadline_ns) {
      fail_rows_late(view, first_row, expected, seen());
      return false;
    }
  }
  std::uint64_t& sum = kind == Wait::start ? control->start_wait_ns : control->later_wait_ns;
  atomicAdd(reinterpret_cast<unsigned long long*>(&sum), device::now_ns() - start);
  return true;
}

}  // namespace megamoe::gpu
