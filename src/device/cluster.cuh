// Warps, warpgroups and clusters: who am I, and who shares what.
#pragma once

#include <cstdint>

namespace megamoe::device {

inline constexpr int kWarpSize = 32;
inline constexpr int kWarpgroupSize = 128;

/// The warp's index in the CTA, in a register the compiler knows to be uniform over the warp.
__device__ inline int warp_idx() {
  return __shfl_sync(0xffffffffU, static_cast<int>(threadIdx.x) / kWarpSize, 0);
}

__device__ inline int lane_idx() { return static_cast<int>(threadIdx.x) % kWarpSize; }

/// True in exactly one lane; the compiler then knows that a single thread runs the branch and keeps
/// its operands in uniform registers (a comparison of lane indices compiles to a loop around each
/// copy instruction instead).
__device__ inline bool elect_one() {
  std::uint32_t elected;
  asm volatile(
      "{\n.reg .pred chosen;\n"
      "elect.sync _|chosen, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, chosen;\n}\n"
      : "=r"(elected));
  return elected != 0;
}

__device__ inline std::uint32_t cluster_cta_rank() {
  std::uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ inline void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ inline void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ inline void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}

/// Gives registers back; all four warps of the warpgroup must execute it, or the warpgroups that
/// wait for them hang.
template <int kRegisters>
__device__ inline void release_registers_to() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void claim_registers_up_to() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace megamoe::device
