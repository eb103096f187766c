// 8x8 blocks of bf16 between registers and 128-byte swizzled tiles in shared memory.
#pragma once

#include <cstdint>

namespace megamoe::device {

/// Rounds two fp32 values to bf16 (nearest even); `first` lands in the lower half.
__device__ inline std::uint32_t pack_bf16(float first, float second) {
  std::uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(packed) : "f"(first), "f"(second));
  return packed;
}
__device__ inline float first_of(std::uint32_t packed) { return __uint_as_float(packed << 16); }
__device__ inline float second_of(std::uint32_t packed) {
  return __uint_as_float(packed & 0xffff0000U);
}

/// Byte offset of 16-byte chunk `chunk` of line `line` in a tile of 128-byte lines with 128-byte
/// swizzle.
__device__ inline std::uint32_t swizzled_offset(std::uint32_t line, std::uint32_t chunk) {
  return line * 128U + ((chunk ^ (line & 7U)) << 4);
}

__device__ inline uint4 load_shared_vector(std::uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

/// Four 8x8 blocks, each transposed on the way; lane l gives the address of line l%8 of block l/8.
__device__ inline void store_blocks_transposed(std::uint32_t address, std::uint32_t r0,
                                               std::uint32_t r1, std::uint32_t r2,
                                               std::uint32_t r3) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
      "r"(r0), "r"(r1), "r"(r2), "r"(r3)
      : "memory");
}
/// The same with two blocks, whose addresses lanes 0..15 give.
__device__ inline void store_two_blocks_transposed(std::uint32_t address,
                                                   const std::uint32_t (&r)[2]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address),
               "r"(r[0]), "r"(r[1])
               : "memory");
}
__device__ inline void load_two_blocks_transposed(std::uint32_t address, std::uint32_t (&r)[2]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(address)
               : "memory");
}

}  // namespace megamoe::device
