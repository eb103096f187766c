// How the rows of one expert are cut into tiles: shared by the host, the kernels and the CPU tests.
//
// Rows count in units of 16. A tile holds at most kMaxUnitsPerTile units; the tiles of an expert
// differ by at most one unit, so that a ragged expert wastes less than one unit in total instead of
// most of its last tile. A row's bits do not depend on the cut.
#pragma once

#include <cstdint>

#include "megamoe/bf16.h"  // MEGAMOE_HOST_DEVICE

namespace megamoe::schedule {

inline constexpr int kRowsPerUnit = 16;
inline constexpr int kMaxUnitsPerTile = 12;
/// Each expert's rows start at a multiple of this, in every row buffer.
inline constexpr int kGroupAlignment = 64;

struct UnitRange {
  int first = 0;
  int count = 0;
};

MEGAMOE_HOST_DEVICE constexpr int ceil_div(int value, int divisor) {
  return (value + divisor - 1) / divisor;
}

MEGAMOE_HOST_DEVICE constexpr int num_row_units(int num_rows) {
  return ceil_div(num_rows, kRowsPerUnit);
}

/// The fewest tiles of at most `max_units` units, as a multiple of `multiple`; 0 for an expert
/// without rows.
MEGAMOE_HOST_DEVICE constexpr int num_unit_tiles(int num_units, int max_units, int multiple) {
  return ceil_div(num_units, max_units * multiple) * multiple;
}

/// Tile `tile_idx` of `num_tiles`; the first (num_units % num_tiles) tiles hold one unit more.
MEGAMOE_HOST_DEVICE constexpr UnitRange unit_tile(int num_units, int num_tiles, int tile_idx) {
  const int small = num_units / num_tiles;
  const int num_large = num_units % num_tiles;
  const int extra = tile_idx < num_large ? 1 : 0;
  return {tile_idx * small + (extra != 0 ? tile_idx : num_large), small + extra};
}

}  // namespace megamoe::schedule
