// The innermost part of the product: two packed panels are multiplied in registers.
// Included once a target.
#if defined(MEGAMOE_CPU_MICRO_KERNEL_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef MEGAMOE_CPU_MICRO_KERNEL_INL_H
#undef MEGAMOE_CPU_MICRO_KERNEL_INL_H
#else
#define MEGAMOE_CPU_MICRO_KERNEL_INL_H
#endif

#include <array>
#include <cstdint>
#include <utility>

#include "cpu/fma-inl.h"
#include "cpu/product.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace megamoe::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// A tile of c is kMaxTileRows x kTileCols. Its accumulators, two vectors a row, stay in registers
// and must be enough of them to hide the latency of an fma (two a cycle, four cycles: eight);
// besides them the kernel needs two vectors of b and one of a. AVX-512 and NEON have 32 registers,
// AVX2 has 16.
#if HWY_TARGET == HWY_AVX2
inline constexpr int kMaxTileRows = 6;
#elif HWY_TARGET == HWY_SCALAR
inline constexpr int kMaxTileRows = 4;
#else
inline constexpr int kMaxTileRows = 12;
#endif
inline constexpr int kVectorsPerRow = 2;
inline constexpr int kLanes = static_cast<int>(hn::MaxLanes(hn::ScalableTag<float>()));
inline constexpr int kTileCols = kVectorsPerRow * kLanes;

/// Continues (or starts) the chains of a kRows x kTileCols tile of c by num_k steps.
/// a_panel[k * kRows + row] and b_panel[k * kTileCols + col] are the operands.
template <int kRows>
void multiply_panels(std::int64_t num_k, const float* HWY_RESTRICT a_panel,
                     const float* HWY_RESTRICT b_panel, float* HWY_RESTRICT c,
                     std::int64_t c_stride, ChainStart start) {
  const hn::ScalableTag<float> d;
  using V = hn::Vec<decltype(d)>;
  // Every loop over a constant is unrolled, so that `sums` is registers and never memory.
  V sums[kRows][kVectorsPerRow];
#pragma GCC unroll 16
  for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectorsPerRow; ++v) {
      sums[row][v] =
          start == ChainStart::zero ? hn::Zero(d) : hn::LoadU(d, c + row * c_stride + v * kLanes);
    }
  }
  for (std::int64_t k = 0; k < num_k; ++k) {
    V b[kVectorsPerRow];
#pragma GCC unroll 2
    for (int v = 0; v < kVectorsPerRow; ++v) b[v] = hn::Load(d, b_panel + v * kLanes);
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) {
      const V a = hn::Set(d, a_panel[row]);
#pragma GCC unroll 2
      for (int v = 0; v < kVectorsPerRow; ++v) {
        sums[row][v] = fused_multiply_add(a, b[v], sums[row][v]);
      }
    }
    a_panel += kRows;
    b_panel += kTileCols;
  }
#pragma GCC unroll 16
  for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectorsPerRow; ++v) {
      hn::StoreU(sums[row][v], d, c + row * c_stride + v * kLanes);
    }
  }
}

using MicroKernel = void (*)(std::int64_t num_k, const float* a_panel, const float* b_panel,
                             float* c, std::int64_t c_stride, ChainStart start);

template <int... kIndices>
constexpr std::array<MicroKernel, sizeof...(kIndices)> make_micro_kernels(
    std::integer_sequence<int, kIndices...>) {
  return {multiply_panels<kIndices + 1>...};
}

/// Entry r - 1 handles tiles of r rows: no work is spent on rows that do not exist.
inline constexpr std::array<MicroKernel, kMaxTileRows> kMicroKernels =
    make_micro_kernels(std::make_integer_sequence<int, kMaxTileRows>());

}  // namespace megamoe::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target guard
