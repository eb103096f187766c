// What a tile waits for while rows are still being pulled: blocks of 64 rows, each with a counter.
// Shared by the kernels' roles and the CPU tests.
//
// Every expert starts at a multiple of kRowsPerBlock, so no block belongs to two experts. A block's
// counter starts at its number of pad rows and grows by one for each row that is in place: whoever
// waits needs no counts, the block is complete at kRowsPerBlock.
#pragma once

#include <cstdint>

#include "schedule/row_tiles.h"

namespace megamoe::schedule {

inline constexpr int kRowsPerBlock = kGroupAlignment;

struct BlockRange {
  int first = 0;
  int count = 0;
};

MEGAMOE_HOST_DEVICE constexpr int block_of_row(int row) { return row / kRowsPerBlock; }

/// The blocks that rows [first_row, first_row + num_rows) touch.
MEGAMOE_HOST_DEVICE constexpr BlockRange blocks_of_rows(int first_row, int num_rows) {
  if (num_rows == 0) return {block_of_row(first_row), 0};
  const int first = block_of_row(first_row);
  return {first, block_of_row(first_row + num_rows - 1) - first + 1};
}

/// What the counter of an expert's block `block` starts at, the expert having `num_rows` rows.
MEGAMOE_HOST_DEVICE constexpr int num_pads_of_block(int num_rows, int block) {
  const int rows_left = num_rows - block * kRowsPerBlock;
  return rows_left >= kRowsPerBlock ? 0 : kRowsPerBlock - rows_left;
}

}  // namespace megamoe::schedule
