// Whole rows between global and shared memory by bulk copies: plain bytes, sizes and addresses in
// multiples of 16.
//
// Loads are load_bytes of tma.cuh. One thread issues, commits, waits and publishes: bulk groups
// belong to a thread.
#pragma once

#include "device/tma.cuh"

namespace megamoe::device {

__device__ inline void store_bytes(void* global, std::uint32_t shared, std::uint32_t num_bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
               "r"(shared), "r"(num_bytes)
               : "memory");
}

/// For bytes that pass through the L2 once: they leave it before anything else does.
inline constexpr std::uint64_t kEvictFirst = 0x12f0000000000000ULL;

/// load_bytes and store_bytes of such bytes.
__device__ inline void load_passing_bytes(std::uint32_t shared, const void* global,
                                          std::uint32_t num_bytes, std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1], %2, [%3], %4;" ::"r"(shared),
      "l"(global), "r"(num_bytes), "r"(barrier), "l"(kEvictFirst)
      : "memory");
}
__device__ inline void store_passing_bytes(void* global, std::uint32_t shared,
                                           std::uint32_t num_bytes) {
  asm volatile(
      "cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;" ::"l"(
          global),
      "r"(shared), "r"(num_bytes), "l"(kEvictFirst)
      : "memory");
}

/// What bulk stores of this thread have completed becomes visible to bulk and tensor loads of who
/// acquires a later signal.
__device__ inline void fence_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

}  // namespace megamoe::device
