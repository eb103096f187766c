// Warpgroup matrix products on 128-byte swizzled tiles in shared memory: D[64, N] += A[64, 16] *
// B[16, N], bf16 into fp32.
//
// Layout of one tile, as the copy engine writes it with 128-byte swizzle (all tiles start at a
// multiple of 1024 bytes):
//   Major::k   rows of 64 K-elements (128 bytes), eight rows an atom of 1024 bytes, atoms along M
//   or N Major::mn  for each K one line of 64 M- or N-elements (128 bytes), eight K an atom of 1024
//   bytes, atoms along K
#pragma once

#include <cstddef>
#include <cstdint>
#include <cute/arch/mma_sm90_gmma.hpp>
#include <cute/arch/mma_sm90_gmma_ext.hpp>
#include <utility>

namespace megamoe::device {

enum class Major { k, mn };

inline constexpr int kWgmmaM = 64;
inline constexpr int kWgmmaK = 16;
inline constexpr std::uint32_t kSwizzleAtomBytes = 1024;

/// Describes a tile for wgmma. `atom_stride_bytes` is the distance of neighbouring 64-element atoms
/// along M or N of a Major::mn tile (ignored for Major::k, whose atoms follow each other).
__device__ inline std::uint64_t tile_descriptor(std::uint32_t shared,
                                                std::uint32_t atom_stride_bytes = 16) {
  constexpr std::uint64_t kSwizzle128 = std::uint64_t{1} << 62;
  return kSwizzle128 | (static_cast<std::uint64_t>(kSwizzleAtomBytes >> 4) << 32) |
         (static_cast<std::uint64_t>(atom_stride_bytes >> 4) << 16) | ((shared & 0x3ffffU) >> 4);
}

/// The descriptor of the same tile `num_bytes` further on.
__device__ inline std::uint64_t advance_descriptor(std::uint64_t descriptor,
                                                   std::uint32_t num_bytes) {
  return descriptor + (num_bytes >> 4);
}

/// How far the start of the tile moves for the next 16 of K.
constexpr std::uint32_t k_step_bytes(Major major) {
  return major == Major::k ? kWgmmaK * 2 : 2 * kSwizzleAtomBytes;
}

namespace detail {
namespace gmma = cute::SM90::GMMA;
constexpr gmma::Major to_cute(Major major) {
  return major == Major::k ? gmma::Major::K : gmma::Major::MN;
}

template <int kN, gmma::Major kMajorA, gmma::Major kMajorB>
struct WgmmaAtom;
#define MEGAMOE_WGMMA_ATOM(n)                                                                      \
  template <gmma::Major kMajorA, gmma::Major kMajorB>                                              \
  struct WgmmaAtom<n, kMajorA, kMajorB> : gmma::MMA_64x##n##x16_F32BF16BF16_SS<kMajorA, kMajorB> { \
  }
MEGAMOE_WGMMA_ATOM(16);
MEGAMOE_WGMMA_ATOM(32);
MEGAMOE_WGMMA_ATOM(48);
MEGAMOE_WGMMA_ATOM(64);
MEGAMOE_WGMMA_ATOM(80);
MEGAMOE_WGMMA_ATOM(96);
MEGAMOE_WGMMA_ATOM(112);
MEGAMOE_WGMMA_ATOM(128);
MEGAMOE_WGMMA_ATOM(144);
MEGAMOE_WGMMA_ATOM(160);
MEGAMOE_WGMMA_ATOM(176);
MEGAMOE_WGMMA_ATOM(192);
#undef MEGAMOE_WGMMA_ATOM

template <class Atom, int kNumRegisters, std::size_t... kIdx>
__device__ inline void call_atom(float (&d)[kNumRegisters], std::uint64_t a, std::uint64_t b,
                                 gmma::ScaleOut scale, std::index_sequence<kIdx...> /*registers*/) {
  Atom::fma(a, b, d[kIdx]..., scale);
}
}  // namespace detail

/// Issues D[64, kN] = A * B + (accumulate ? D : 0). D of thread (warp w, lane l of the warpgroup):
/// d[4*j + 2*h + i] is row 16*w + 8*h + l/4, column 8*j + 2*(l%4) + i. Registers beyond kN / 2 are
/// left alone.
template <int kN, Major kMajorA, Major kMajorB, int kNumRegisters>
__device__ inline void wgmma(float (&d)[kNumRegisters], std::uint64_t a, std::uint64_t b,
                             bool accumulate) {
  static_assert(kN % 16 == 0 && kN / 2 <= kNumRegisters);
  using Atom = detail::WgmmaAtom<kN, detail::to_cute(kMajorA), detail::to_cute(kMajorB)>;
  detail::call_atom<Atom>(d, a, b,
                          accumulate ? detail::gmma::ScaleOut::One : detail::gmma::ScaleOut::Zero,
                          std::make_index_sequence<kN / 2>());
}

__device__ inline void wgmma_begin_group() { cute::warpgroup_arrive(); }
__device__ inline void wgmma_end_group() { cute::warpgroup_commit_batch(); }
template <int kPending>
__device__ inline void wgmma_wait() {
  cute::warpgroup_wait<kPending>();
}

/// Keeps the compiler from moving reads or writes of the accumulators across this point.
template <int kBlocks, int kNumRegisters>
__device__ inline void pin_accumulators(float (&d)[kBlocks][kNumRegisters]) {
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
    for (int i = 0; i < kNumRegisters; ++i) cute::warpgroup_fence_operand(d[block][i]);
  }
}

/// Tells the compiler, at no cost, that the old values are dead. The first wgmma of a tile ignores
/// them through a run-time predicate, so without this they seem to live from tile to tile, and 160
/// of them were spilled around the tile walk.
template <int kBlocks, int kNumRegisters>
__device__ inline void forget_accumulators(float (&d)[kBlocks][kNumRegisters]) {
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
    for (int i = 0; i < kNumRegisters; ++i) asm volatile("" : "=f"(d[block][i]));
  }
}

}  // namespace megamoe::device
