// Sums over the threads of one CTA that lays out rows.
#pragma once

#include <cstdint>

#include "device/cluster.cuh"

namespace megamoe::gpu {

/// shared.prefix[i] becomes the sum of the values of threads before i.
template <class SharedSums>
__device__ inline void scan_threads(SharedSums& shared, std::uint64_t value) {
  const int lane = device::lane_idx();
  const int warp = device::warp_idx();
  std::uint64_t sum = value;
  for (int distance = 1; distance < device::kWarpSize; distance *= 2) {
    const std::uint64_t other = __shfl_up_sync(0xffffffffU, sum, distance);
    if (lane >= distance) sum += other;
  }
  if (lane == device::kWarpSize - 1) shared.warp_totals[warp] = sum;
  __syncthreads();
  std::uint64_t before = 0;
  for (int other = 0; other < warp; ++other) before += shared.warp_totals[other];
  shared.prefix[threadIdx.x + 1] = before + sum;
  if (threadIdx.x == 0) shared.prefix[0] = 0;
  __syncthreads();
}

}  // namespace megamoe::gpu
