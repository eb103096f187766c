// Blocks of the product: what is packed when, and which tiles the micro kernel works on.
#include "cpu/product.h"

#include <algorithm>
#include <new>
#include <string>

#include "cpu/simd_targets.h"
#include "megamoe/error.h"

// Everything below is compiled once for each target; HWY_ONCE marks the part that is not.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/product.cc"
#include "hwy/foreach_target.h"
// Highway's order: foreach_target.h before anything that includes highway.h.
#include "cpu/micro_kernel-inl.h"
#include "cpu/pack-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace megamoe::cpu::HWY_NAMESPACE {

// A panel of b (kBlockK x kTileCols) stays in the first-level cache while all tiles of a block of
// rows use it; the packed rows of a (kBlockRows x kBlockK, 480 KB) stay in the second level. The
// panel is packed again for each block of rows: about 1% of the work at 480 rows.
inline constexpr std::int64_t kBlockK = 256;
inline constexpr std::int64_t kBlockRows = 480;

/// num_rows cut into tiles of at most kMaxTileRows rows, as equal as possible: with 12, 64
/// rows are six tiles of 10 or 11, not five of 12 and a slow one of 4.
class RowTiles {
 public:
  explicit RowTiles(std::int64_t num_rows)
      : num_rows_(num_rows), num_tiles_((num_rows + kMaxTileRows - 1) / kMaxTileRows) {}
  [[nodiscard]] std::int64_t num_tiles() const { return num_tiles_; }
  /// first_row(num_tiles()) is the number of rows.
  [[nodiscard]] std::int64_t first_row(std::int64_t tile) const {
    return num_rows_ * tile / num_tiles_;
  }

 private:
  std::int64_t num_rows_;
  std::int64_t num_tiles_;
};

/// A tile at c's right edge: the kernel works on a copy, so that nothing beyond column num_cols is
/// read or written.
void multiply_edge_tile(MicroKernel kernel, std::int64_t num_rows, std::int64_t num_cols,
                        std::int64_t num_k, const float* a_panel, const float* b_panel, float* c,
                        std::int64_t c_stride, ChainStart start) {
  float tile[kMaxTileRows * kTileCols] = {};
  if (start == ChainStart::output) {
    for (std::int64_t row = 0; row < num_rows; ++row) {
      std::copy_n(c + row * c_stride, num_cols, tile + row * kTileCols);
    }
  }
  kernel(num_k, a_panel, b_panel, tile, kTileCols, start);
  for (std::int64_t row = 0; row < num_rows; ++row) {
    std::copy_n(tile + row * kTileCols, num_cols, c + row * c_stride);
  }
}

/// One block of rows and one block of k, all columns.
void multiply_block(std::int64_t num_rows, std::int64_t n, std::int64_t num_k, Operand a, Operand b,
                    float* c, std::int64_t c_stride, ChainStart start, float* a_panels,
                    float* b_panel) {
  const RowTiles tiles(num_rows);
  for (std::int64_t tile = 0; tile < tiles.num_tiles(); ++tile) {
    const std::int64_t row = tiles.first_row(tile);
    const std::int64_t tile_rows = tiles.first_row(tile + 1) - row;
    pack_panel(a.from(row, 0), tile_rows, num_k, tile_rows, a_panels + row * num_k);
  }
  for (std::int64_t col = 0; col < n; col += kTileCols) {
    const std::int64_t tile_cols = std::min<std::int64_t>(kTileCols, n - col);
    pack_panel(b.from(col, 0), tile_cols, num_k, kTileCols, b_panel);
    for (std::int64_t tile = 0; tile < tiles.num_tiles(); ++tile) {
      const std::int64_t row = tiles.first_row(tile);
      const std::int64_t tile_rows = tiles.first_row(tile + 1) - row;
      const MicroKernel kernel = kMicroKernels[static_cast<std::size_t>(tile_rows - 1)];
      const float* a_panel = a_panels + row * num_k;
      float* c_tile = c + row * c_stride + col;
      if (tile_cols == kTileCols) {
        kernel(num_k, a_panel, b_panel, c_tile, c_stride, start);
      } else {
        multiply_edge_tile(kernel, tile_rows, tile_cols, num_k, a_panel, b_panel, c_tile, c_stride,
                           start);
      }
    }
  }
}

void multiply(std::int64_t m, std::int64_t n, std::int64_t num_k, Operand a, Operand b, float* c,
              std::int64_t c_stride, ChainStart start, ProductScratch& scratch) {
  const std::int64_t block_k = std::min(num_k, kBlockK);
  const std::int64_t block_rows = std::min(m, kBlockRows);
  // The panel of b comes first: its vector loads are aligned.
  float* b_panel = scratch.reserve(block_k * (kTileCols + block_rows));
  float* a_panels = b_panel + block_k * kTileCols;
  for (std::int64_t k = 0; k < num_k; k += kBlockK) {
    for (std::int64_t row = 0; row < m; row += kBlockRows) {
      multiply_block(std::min(kBlockRows, m - row), n, std::min(kBlockK, num_k - k), a.from(row, k),
                     b.from(0, k), c + row * c_stride, c_stride,
                     k == 0 ? start : ChainStart::output, a_panels, b_panel);
    }
  }
}

std::int64_t scratch_floats_bound() { return kBlockK * (kTileCols + kBlockRows); }

}  // namespace megamoe::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace megamoe::cpu {

HWY_EXPORT(multiply);
HWY_EXPORT(scratch_floats_bound);

namespace {
constexpr std::align_val_t kCacheLine{64};
}  // namespace

void ProductScratch::Free::operator()(float* data) const { ::operator delete[](data, kCacheLine); }

float* ProductScratch::reserve(std::int64_t num_floats) {
  if (num_floats > capacity_) {
    const auto num_bytes = static_cast<std::size_t>(num_floats) * sizeof(float);
    auto* data = static_cast<float*>(::operator new[](num_bytes, kCacheLine, std::nothrow));
    if (data == nullptr) {
      throw Error(ErrorCode::out_of_memory,
                  "matrix product: no memory for " + std::to_string(num_bytes) + " packed bytes");
    }
    data_.reset(data);
    capacity_ = num_floats;
  }
  return data_.get();
}

std::int64_t max_scratch_floats() { return HWY_DYNAMIC_DISPATCH(scratch_floats_bound)(); }

void product(std::int64_t m, std::int64_t n, std::int64_t num_k, Operand a, Operand b, float* c,
             std::int64_t c_stride, ChainStart start, ProductScratch& scratch) {
  if (m == 0 || n == 0) return;
  if (num_k == 0) {
    if (start == ChainStart::output) return;
    for (std::int64_t row = 0; row < m; ++row) std::fill_n(c + row * c_stride, n, 0.0F);
    return;
  }
  HWY_DYNAMIC_DISPATCH(multiply)(m, n, num_k, a, b, c, c_stride, start, scratch);
}

}  // namespace megamoe::cpu
#endif  // HWY_ONCE
