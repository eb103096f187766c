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

}  // namespace megamoe::device
