// Contiguous bytes between global and shared memory through the copy engine. Addresses and sizes
// are multiples of 16. Each function is called by one thread; stores belong to that thread's bulk
// groups (commit_stores and waits: tma.cuh).
#pragma once

#include <cstdint>

namespace megamoe::device {

/// Completes on the mbarrier `barrier`, which expects the bytes.
__device__ inline void load_bytes(std::uint32_t shared, const void* global, std::uint32_t num_bytes,
                                  std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared),
      "l"(global), "r"(num_bytes), "r"(barrier)
      : "memory");
}

__device__ inline void store_bytes(void* global, std::uint32_t shared, std::uint32_t num_bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
               "r"(shared), "r"(num_bytes)
               : "memory");
}

}  // namespace megamoe::device
