// What one thread of the CPU backend computes in: tiles of fp32 results and the panels of its
// products.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/product.h"

namespace megamoe::cpu {

/// Rows and columns of the tiles that stages work on. Columns are a multiple of the dw segment; a
/// tile and the panels stay in a 2 MB L2. More rows share the packing of a block of weights.
inline constexpr std::int64_t kTileRows = 256;
inline constexpr std::int64_t kTileColumns = 128;

struct ThreadScratch {
  /// Reserves what any product needs: which thread meets the largest one first is chance, and a
  /// step must not allocate.
  ThreadScratch() { panels.reserve(max_scratch_floats()); }

  ProductScratch panels;
  std::vector<float> tile = std::vector<float>(kTileRows * kTileColumns);
  std::vector<float> gate_tile = std::vector<float>(kTileRows * kTileColumns);
  std::vector<float> up_tile = std::vector<float>(kTileRows * kTileColumns);
};

}  // namespace megamoe::cpu
