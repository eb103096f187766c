// Packing: a block of a bf16 operand becomes an fp32 panel in the order in which the micro kernel
// reads it. Included once a target.
#if defined(MEGAMOE_CPU_PACK_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef MEGAMOE_CPU_PACK_INL_H
#undef MEGAMOE_CPU_PACK_INL_H
#else
#define MEGAMOE_CPU_PACK_INL_H
#endif

#include <cstdint>

#include "cpu/product.h"
#include "cpu/widen-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace megamoe::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// The generic way, and the remainders of the fast ones.
inline void pack_elements(Operand source, std::int64_t first_row, std::int64_t num_rows,
                          std::int64_t first_k, std::int64_t num_k, std::int64_t width,
                          float* HWY_RESTRICT panel) {
  for (std::int64_t k = first_k; k < num_k; ++k) {
    const bf16* column = source.data + k * source.col_stride;
    for (std::int64_t row = first_row; row < num_rows; ++row) {
      panel[k * width + row] = to_float(column[row * source.row_stride]);
    }
  }
}

#if HWY_TARGET == HWY_SCALAR
inline void pack_contiguous_rows(Operand source, std::int64_t num_rows, std::int64_t num_k,
                                 std::int64_t width, float* HWY_RESTRICT panel) {
  pack_elements(source, 0, num_rows, 0, num_k, width, panel);
}
inline void pack_contiguous_k(Operand source, std::int64_t num_rows, std::int64_t num_k,
                              std::int64_t width, float* HWY_RESTRICT panel) {
  pack_elements(source, 0, num_rows, 0, num_k, width, panel);
}
#else

/// Converts as many whole vectors of D as fit in count elements; returns how many elements.
template <class D>
HWY_INLINE std::int64_t widen(D d, const bf16* HWY_RESTRICT source, std::int64_t count,
                              float* HWY_RESTRICT target) {
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  std::int64_t done = 0;
  for (; done + lanes <= count; done += lanes) {
    hn::StoreU(widen_lanes(d, source + done), d, target + done);
  }
  return done;
}

/// row_stride == 1: neighbours in the panel are neighbours in memory.
inline void pack_contiguous_rows(Operand source, std::int64_t num_rows, std::int64_t num_k,
                                 std::int64_t width, float* HWY_RESTRICT panel) {
  for (std::int64_t k = 0; k < num_k; ++k) {
    const bf16* from = source.data + k * source.col_stride;
    float* to = panel + k * width;
    std::int64_t row = widen(hn::ScalableTag<float>(), from, num_rows, to);
    row += widen(hn::FixedTag<float, 4>(), from + row, num_rows - row, to + row);
    for (; row < num_rows; ++row) to[row] = to_float(from[row]);
  }
}

/// A vector of 128-bit blocks of 8 bf16 each: block i is loaded from source + i * block_stride.
template <class D>
HWY_INLINE hn::Vec<D> load_blocks(D d_u32, const bf16* source, std::int64_t block_stride) {
  constexpr std::size_t kNumBlocks = hn::MaxLanes(D()) / 4;
  if constexpr (kNumBlocks == 1) {
    const hn::Repartition<std::uint16_t, D> d_u16;
    return hn::BitCast(d_u32, hn::LoadU(d_u16, &source->bits));
  } else {
    const hn::Half<D> d_half;
    const bf16* upper = source + static_cast<std::int64_t>(kNumBlocks / 2) * block_stride;
    return hn::Combine(d_u32, load_blocks(d_half, upper, block_stride),
                       load_blocks(d_half, source, block_stride));
  }
}

/// col_stride == 1: a transposition, here of 8 k and as many rows as D has lanes. In 32-bit lanes,
/// each of which holds the bf16 of k (low half) and k + 1 (high half), it is a 4 x 4 transposition
/// in each 128-bit block: block i has rows 4i to 4i + 3.
template <class D>
HWY_INLINE void transpose(D d, Operand source, std::int64_t width, float* HWY_RESTRICT panel) {
  const hn::RebindToUnsigned<D> d_u32;
  const hn::Repartition<std::uint64_t, D> d_u64;
  const std::int64_t stride = source.row_stride;
  const auto row0 = load_blocks(d_u32, source.data, 4 * stride);
  const auto row1 = load_blocks(d_u32, source.data + stride, 4 * stride);
  const auto row2 = load_blocks(d_u32, source.data + 2 * stride, 4 * stride);
  const auto row3 = load_blocks(d_u32, source.data + 3 * stride, 4 * stride);
  const auto low01 = hn::BitCast(d_u64, hn::InterleaveLower(d_u32, row0, row1));
  const auto low23 = hn::BitCast(d_u64, hn::InterleaveLower(d_u32, row2, row3));
  const auto high01 = hn::BitCast(d_u64, hn::InterleaveUpper(d_u32, row0, row1));
  const auto high23 = hn::BitCast(d_u64, hn::InterleaveUpper(d_u32, row2, row3));
  const auto odd_mask = hn::Set(d_u32, 0xffff0000U);
  const auto store_pair = [&](auto pair, int k) HWY_ATTR {
    const auto bits = hn::BitCast(d_u32, pair);
    hn::StoreU(hn::BitCast(d, hn::ShiftLeft<16>(bits)), d, panel + k * width);
    hn::StoreU(hn::BitCast(d, hn::And(bits, odd_mask)), d, panel + (k + 1) * width);
  };
  store_pair(hn::InterleaveLower(d_u64, low01, low23), 0);
  store_pair(hn::InterleaveUpper(d_u64, low01, low23), 2);
  store_pair(hn::InterleaveLower(d_u64, high01, high23), 4);
  store_pair(hn::InterleaveUpper(d_u64, high01, high23), 6);
}

/// Packs D's number of rows, starting at first_row.
template <class D>
HWY_INLINE void pack_row_group(D d, Operand source, std::int64_t first_row, std::int64_t num_k,
                               std::int64_t width, float* HWY_RESTRICT panel) {
  constexpr std::int64_t kGroupK = 8;
  std::int64_t k = 0;
  for (; k + kGroupK <= num_k; k += kGroupK) {
    transpose(d, source.from(first_row, k), width, panel + k * width + first_row);
  }
  const auto last_row = first_row + static_cast<std::int64_t>(hn::Lanes(d));
  pack_elements(source, first_row, last_row, k, num_k, width, panel);
}

inline void pack_contiguous_k(Operand source, std::int64_t num_rows, std::int64_t num_k,
                              std::int64_t width, float* HWY_RESTRICT panel) {
  // Row groups outermost: rows of a weight are often a multiple of 4 KB apart, which puts them into
  // one set of the first-level cache, and a set cannot hold a line of each row of a panel.
  // Whole vectors of rows where possible: with 16 rows at once instead of 4 a 64 x 768 x 2048
  // product took 15% less time (AVX-512).
  const hn::ScalableTag<float> d_large;
  const hn::FixedTag<float, 4> d_small;
  constexpr std::int64_t kLargeGroup = hn::MaxLanes(d_large);
  constexpr std::int64_t kSmallGroup = 4;
  std::int64_t row = 0;
  for (; row + kLargeGroup <= num_rows; row += kLargeGroup) {
    pack_row_group(d_large, source, row, num_k, width, panel);
  }
  for (; row + kSmallGroup <= num_rows; row += kSmallGroup) {
    pack_row_group(d_small, source, row, num_k, width, panel);
  }
  if (row == num_rows) return;
  if (num_rows >= kSmallGroup) {
    // The last group overlaps the one before and writes the same values again.
    pack_row_group(d_small, source, num_rows - kSmallGroup, num_k, width, panel);
  } else {
    pack_elements(source, 0, num_rows, 0, num_k, width, panel);
  }
}
#endif  // HWY_TARGET == HWY_SCALAR

/// panel[k * width + row] = source(row, k) for row < num_rows; rows from there to width are zero.
inline void pack_panel(Operand source, std::int64_t num_rows, std::int64_t num_k,
                       std::int64_t width, float* HWY_RESTRICT panel) {
  if (source.row_stride == 1) {
    pack_contiguous_rows(source, num_rows, num_k, width, panel);
  } else if (source.col_stride == 1) {
    pack_contiguous_k(source, num_rows, num_k, width, panel);
  } else {
    pack_elements(source, 0, num_rows, 0, num_k, width, panel);
  }
  if (num_rows == width) return;
  for (std::int64_t k = 0; k < num_k; ++k) {
    for (std::int64_t row = num_rows; row < width; ++row) panel[k * width + row] = 0.0F;
  }
}

}  // namespace megamoe::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target guard
