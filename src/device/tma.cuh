// Tensor tiles between global and shared memory through the copy engine (TMA).
//
// Every function is to be called by one thread. Loads complete on an mbarrier; stores belong to the
// issuing thread's bulk groups: the same thread commits and waits.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace megamoe::device {

/// Coordinates count elements, innermost dimension first.
__device__ inline void load_tile(std::uint32_t shared, const CUtensorMap* map,
                                 std::uint32_t barrier, int c0, int c1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, "
      "%4}], [%2];" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1)
      : "memory");
}
__device__ inline void load_tile(std::uint32_t shared, const CUtensorMap* map,
                                 std::uint32_t barrier, int c0, int c1, int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, "
      "%4, %5}], [%2];" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}
__device__ inline void load_tile(std::uint32_t shared, const CUtensorMap* map,
                                 std::uint32_t barrier, int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, "
      "%4, %5, %6}], [%2];" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

/// Plain bytes: addresses and size are multiples of 16.
__device__ inline void load_bytes(std::uint32_t shared, const void* global, std::uint32_t num_bytes,
                                  std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared),
      "l"(global), "r"(num_bytes), "r"(barrier)
      : "memory");
}

/// The same tile goes to the same shared-memory offset, and completes on the same barrier offset,
/// in each CTA of `cta_mask`.
__device__ inline void load_tile_multicast(std::uint32_t shared, const CUtensorMap* map,
                                           std::uint32_t barrier, std::uint16_t cta_mask, int c0,
                                           int c1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::"
      "cluster [%0], [%1, {%4, %5}], "
      "[%2], %3;" ::"r"(shared),
      "l"(map), "r"(barrier), "h"(cta_mask), "r"(c0), "r"(c1)
      : "memory");
}
__device__ inline void load_tile_multicast(std::uint32_t shared, const CUtensorMap* map,
                                           std::uint32_t barrier, std::uint16_t cta_mask, int c0,
                                           int c1, int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::"
      "cluster [%0], [%1, {%4, %5, "
      "%6}], [%2], %3;" ::"r"(shared),
      "l"(map), "r"(barrier), "h"(cta_mask), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}
__device__ inline void load_tile_multicast(std::uint32_t shared, const CUtensorMap* map,
                                           std::uint32_t barrier, std::uint16_t cta_mask, int c0,
                                           int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::"
      "cluster [%0], [%1, {%4, %5, "
      "%6, %7}], [%2], %3;" ::"r"(shared),
      "l"(map), "r"(barrier), "h"(cta_mask), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

/// What lies outside the tensor is not written.
__device__ inline void store_tile(const CUtensorMap* map, std::uint32_t shared, int c0, int c1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
      "r"(shared), "r"(c0), "r"(c1)
      : "memory");
}
__device__ inline void store_tile(const CUtensorMap* map, std::uint32_t shared, int c0, int c1,
                                  int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
      "r"(shared), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}
__device__ inline void store_tile(const CUtensorMap* map, std::uint32_t shared, int c0, int c1,
                                  int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(
          map),
      "r"(shared), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}
/// Adds the tile into fp32 memory. Deterministic as long as each element has one writer a launch.
__device__ inline void add_tile(const CUtensorMap* map, std::uint32_t shared, int c0, int c1,
                                int c2, int c3) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.bulk_group [%0, {%2, %3, %4, %5}], "
      "[%1];" ::"l"(map),
      "r"(shared), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

__device__ inline void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
/// At most `kPending` of the calling thread's groups still read their shared memory.
template <int kPending>
__device__ inline void wait_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
/// At most `kPending` of the calling thread's groups are not complete in global memory.
template <int kPending>
__device__ inline void wait_stores_complete() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace megamoe::device
