// A load as kernels read it: [2E + 1] fp64, counts, score sums, number of tokens.
#pragma once

#include "kernels/router/token.cuh"

namespace megamoe::gpu {

/// By all threads of a block of kRouterThreads; a fixed order.
template <class T>
__device__ T block_sum(T value) {
  __shared__ T sums[kRouterWarps];
  const int warp = device::warp_idx();  // a shuffle: all lanes take part
  value = warp_sum(value);
  if (device::lane_idx() == 0) sums[warp] = value;
  __syncthreads();
  T total = 0;
  for (int other = 0; other < kRouterWarps; ++other) total += sums[other];
  __syncthreads();  // the next sum may write
  return total;
}

/// What no sum of loads is, NaN included.
__device__ inline bool is_load_value(double value) { return value >= 0.0 && value <= 0x1p53; }

struct LoadTotals {
  long long num_slots;
  double num_tokens;
};

/// By all threads of a block; false in all where a value is no sum of loads or the load covers
/// fewer tokens than the call.
__device__ inline bool read_load(const RouterConfig& config, const RouterReads& reads,
                                 LoadTotals& totals) {
  const int num_experts = static_cast<int>(config.num_experts);
  bool valid = true;
  long long slots = 0;
  for (int j = static_cast<int>(threadIdx.x); j < 2 * num_experts + 1; j += kRouterThreads) {
    const double value = reads.load[j];
    valid = valid && is_load_value(value);
    if (valid && j < num_experts) slots += static_cast<long long>(value);
  }
  if (__syncthreads_and(valid ? 1 : 0) == 0) return false;
  totals = {block_sum(slots), reads.load[2 * num_experts]};
  return totals.num_tokens >= static_cast<double>(reads.num_tokens);
}

/// Share of the slots that went to an expert.
__device__ inline double slot_share(const RouterReads& reads, const LoadTotals& totals,
                                    int expert) {
  const auto count = static_cast<double>(static_cast<long long>(reads.load[expert]));
  return totals.num_slots > 0 ? count / static_cast<double>(totals.num_slots) : 0.0;
}

}  // namespace megamoe::gpu
