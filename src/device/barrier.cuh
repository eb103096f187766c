// mbarriers, named by what became true when their phase completes, and the waits on them.
//
// Waits here are on barriers of the own cluster only: their producers are the same kernel, so a
// wait can only fail through a bug of the library. Debug builds bound every such wait and name the
// barrier; release builds do not pay for it. Waits on other GPUs are in flags.cuh and always have a
// deadline.
#pragma once

#include <cstdint>
#ifndef NDEBUG
#include <cstdio>
#endif

namespace megamoe::device {

/// The 32-bit shared-memory address that PTX instructions take.
__device__ inline std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

/// Makes barrier initialisations visible to the copy engine and to the other CTA of the cluster; a
/// cluster barrier follows.
__device__ inline void publish_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ inline void init_barrier(std::uint32_t barrier, std::uint32_t num_arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(num_arrivals)
               : "memory");
}

__device__ inline void arrive(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/// One arrival that also announces `num_bytes` of bulk copies which will complete on the barrier.
__device__ inline void arrive_expecting(std::uint32_t barrier, std::uint32_t num_bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
               "r"(num_bytes)
               : "memory");
}

/// The address of the same shared-memory object in the CTA `cta_rank` of the cluster.
__device__ inline std::uint32_t cluster_address(std::uint32_t address, std::uint32_t cta_rank) {
  std::uint32_t mapped;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(cta_rank));
  return mapped;
}

/// arrive_expecting() on a barrier of any CTA of the cluster.
__device__ inline void arrive_expecting_in_cluster(std::uint32_t cluster_barrier,
                                                   std::uint32_t num_bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%0], %1;" ::"r"(cluster_barrier),
               "r"(num_bytes)
               : "memory");
}

/// One arrival on a barrier of any CTA of the cluster that says "my reads are over" and publishes
/// no writes. The reads are those of wgmma, which wgmma.wait_group has completed, so the arrival
/// needs no cluster-wide release: that would compile to a memory barrier of the whole GPU in every
/// stage (and the matching acquire to an invalidation of the L1).
__device__ inline void arrive_reads_over(std::uint32_t cluster_barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(cluster_barrier) : "memory");
}
/// The same, for `num_arrivals` warps at once.
__device__ inline void arrive_reads_over(std::uint32_t cluster_barrier,
                                         std::uint32_t num_arrivals) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0], %1;" ::"r"(cluster_barrier),
               "r"(num_arrivals)
               : "memory");
}

__device__ inline bool phase_completed(std::uint32_t barrier, std::uint32_t parity) {
  std::uint32_t completed;
  asm volatile(
      "{\n.reg .pred done;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n}\n"
      : "=r"(completed)
      : "r"(barrier), "r"(parity)
      : "memory");
  return completed != 0;
}

/// Waits until the phase of the given parity has completed.
__device__ inline void wait(std::uint32_t barrier, std::uint32_t parity) {
#ifdef NDEBUG
  while (!phase_completed(barrier, parity)) {
  }
#else
  constexpr long long kDebugDeadlineCycles = 8'000'000'000;  // about five seconds
  const long long start = clock64();
  bool reported = false;
  while (!phase_completed(barrier, parity)) {
    if (!reported && clock64() - start > kDebugDeadlineCycles) {
      reported = true;  // once; a return or trap here would make ptxas serialise wgmma
      printf("megamoe: block %d thread %d waits for the barrier at shared address %u, parity %u\n",
             blockIdx.x, threadIdx.x, barrier, parity);
    }
  }
#endif
}

/// A position in a ring of `kDepth` slots, with the parity of the pass over the ring.
template <int kDepth>
struct RingPosition {
  std::uint32_t slot = 0;
  std::uint32_t parity = 0;

  __device__ void advance() {
    ++slot;
    if (slot == kDepth) {
      slot = 0;
      parity ^= 1U;
    }
  }
};

/// Shared memory written by ordinary stores becomes readable by the copy engine and the tensor
/// cores.
__device__ inline void fence_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace megamoe::device
