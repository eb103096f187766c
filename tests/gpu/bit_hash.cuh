// One number for the bits of a device buffer: equal buffers give equal numbers, whatever the order
// of summation.
#pragma once

#include "gpu/device_buffers.cuh"

namespace megamoe::testing {

__global__ void hash_words(const std::uint32_t* words, std::int64_t size, unsigned long long* sum) {
  unsigned long long local = 0;
  for (std::int64_t i = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x; i < size;
       i += std::int64_t{gridDim.x} * blockDim.x) {
    const std::uint64_t mixed =
        (static_cast<std::uint64_t>(i) << 32 ^ words[i]) * 0x9e3779b97f4a7c15ULL;
    local += mixed ^ mixed >> 29;
  }
  atomicAdd(sum, local);
}

/// `num_bytes` is a multiple of 4. Adds into the device word `sum`.
inline void add_bit_hash(const void* data, std::int64_t num_bytes, unsigned long long* sum) {
  hash_words<<<256, 256>>>(static_cast<const std::uint32_t*>(data), num_bytes / 4, sum);
  check_cuda(cudaGetLastError(), "hash_words");
}

}  // namespace megamoe::testing
