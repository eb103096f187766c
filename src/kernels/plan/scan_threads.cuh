// Sums over the threads of one CTA that lays out rows.
#pragma once

#include <cstdint>

#include "device/cluster.cuh"

namespace megamoe::gpu {

/// The sum of the values of lanes up to this one; by all lanes.
template <class T>
__device__ inline T sum_up_to_lane(T value) {
  const int lane = device::lane_idx();
  for (int distance = 1; distance < device::kWarpSize; distance *= 2) {
    const T other = __shfl_up_sync(0xffffffffU, value, distance);
    if (lane >= distance) value += other;
  }
  return value;
}

/// shared.prefix[i] becomes the sum of the values of threads before i.
template <class SharedSums>
__device__ inline void scan_threads(SharedSums& shared, std::uint64_t value) {
  const int lane = device::lane_idx();
  const int warp = device::warp_idx();
  const std::uint64_t sum = sum_up_to_lane(value);
  if (lane == device::kWarpSize - 1) shared.warp_totals[warp] = sum;
  __syncthreads();
  std::uint64_t before = 0;
  for (int other = 0; other < warp; ++other) before += shared.warp_totals[other];
  shared.prefix[threadIdx.x + 1] = before + sum;
  if (threadIdx.x == 0) shared.prefix[0] = 0;
  __syncthreads();
}

}  // namespace megamoe::gpu
