// Words of shared memory that the CTAs of a cluster read and write in each other. Addresses are
// those of cluster_address().
#pragma once

#include <cstdint>

namespace megamoe::device {

/// Follows a cluster barrier behind the write; another one before the owner may leave.
__device__ inline std::uint32_t load_cluster_word(std::uint32_t cluster_address) {
  std::uint32_t value;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(cluster_address) : "memory");
  return value;
}

/// Seen by who later learns, through a barrier, of something that this thread does afterwards.
__device__ inline void store_cluster_word(std::uint32_t cluster_address, std::uint32_t value) {
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(cluster_address), "r"(value) : "memory");
  asm volatile("fence.acq_rel.cluster;" ::: "memory");
}

/// Sends `value` to `cluster_address`, and completes four bytes on `cluster_barrier`, which lies in
/// the same CTA: who waits for that barrier there sees the word.
__device__ inline void send_cluster_word(std::uint32_t cluster_address, std::uint32_t value,
                                         std::uint32_t cluster_barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(
          cluster_address),
      "r"(value), "r"(cluster_barrier)
      : "memory");
}

/// Of the own CTA, behind a wait for the barrier on which the word was sent.
__device__ inline std::uint32_t load_shared_word(std::uint32_t address) {
  std::uint32_t value;
  asm volatile("ld.shared::cta.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}

}  // namespace megamoe::device
