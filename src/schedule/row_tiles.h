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

/// How the last experts are cut finer, so that the last round of CTAs or clusters is full: experts
/// whose tiles start at `first` or later hold numerator / denominator times as many row tiles.
struct TailCut {
  int first = 0;
  int numerator = 1;
  int denominator = 1;

  /// Row tiles of such an expert, of at least one of its units each.
  [[nodiscard]] MEGAMOE_HOST_DEVICE constexpr int cut(int num_row_tiles, int max_row_tiles) const {
    const int finer = (2 * num_row_tiles * numerator + denominator) / (2 * denominator);
    return finer < max_row_tiles ? finer : max_row_tiles;
  }
};

/// `num_tiles` tiles on `num_workers` that each take every num_workers-th: the tiles of the last,
/// partly filled round (and of the one before, where it is less than half full) fill one or two
/// whole rounds. At most twice as many tiles: smaller ones load more for what they multiply.
MEGAMOE_HOST_DEVICE constexpr TailCut cut_tail(int num_tiles, int num_workers) {
  const int rest = num_tiles % num_workers;
  if (rest == 0) return {num_tiles, 1, 1};
  int tail = 2 * rest >= num_workers ? rest : rest + num_workers;
  tail = tail < num_tiles ? tail : num_tiles;
  const int target = tail > num_workers ? 2 * num_workers : num_workers;
  return {num_tiles - tail, target < 2 * tail ? target : 2 * tail, tail};
}

}  // namespace megamoe::schedule
