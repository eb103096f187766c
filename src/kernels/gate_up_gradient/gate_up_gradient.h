// p = dy down, and what the epilogue makes of it: dg, du, w a and the partial dw. What the kernel
// is given, and where everything lies in its shared memory.
//
// Channels are I, K is H. The epilogue reads g and u and writes dg, du and w a: 480 KB for every
// 256 x 192 values of p, more than an SM moves while two warpgroups compute them. So the two math
// warpgroups work on tiles of their own, 128 channels x 192 rows, and take turns: one multiplies
// while the other is in its epilogue. That costs a third more operand traffic than one tile of
// 256 x 192 for both, and is 5% faster at H of 4096 and 2048 (docs/perf_log.md).
#pragma once

#include <cuda.h>

#include <cstdint>

#include "kernels/products/row_product.h"
#include "kernels/products/shared_ring.h"

namespace megamoe::products {

struct GateUpGradientParams {
  CUtensorMap down;
  RowMaps dy;
  RowMaps g;  ///< g and dg are left empty where there is no gate
  RowMaps u;
  RowMaps dg;
  RowMaps du;
  RowMaps wa;
  const float* row_weights;  ///< [row capacity]
  float* dw_segments;        ///< [I / 64][row capacity]: sums of p * a over 64 channels
  std::int64_t row_capacity;
  GroupedRowsArgs rows;
  std::int32_t num_channels;
  std::int32_t num_channel_tiles;
  std::int32_t num_k_blocks;
  device::ProductEnds* ends;  ///< or null
  trace::Region trace_region;
};

namespace gradient {

/// One warpgroup's tile is 128 channels x 192 rows; four stages of 40 KB carry its operands.
inline constexpr int kTileChannels = kBlocksPerWarpgroup * kBlockChannels;
inline constexpr int kNumStages = 4;
inline constexpr std::uint32_t kChannelBytes = kTileChannels * kBlockK * 2;
inline constexpr std::uint32_t kStageBytes = kChannelBytes + kRowBytes;

/// The epilogue works on parts of 64 channels x 48 rows. A part's buffer brings g and u, takes dg
/// and du in their places and w a behind them, and leaves through the copy engine.
inline constexpr int kPartUnits = 3;
inline constexpr int kPartRows = kPartUnits * schedule::kRowsPerUnit;
inline constexpr int kMaxPartsPerBlock = schedule::kMaxUnitsPerTile / kPartUnits;
inline constexpr int kNumPartBuffers = 3;
inline constexpr std::uint32_t kMatrixBytes = kPartRows * kBlockChannels * 2;
inline constexpr std::uint32_t kUpOffset = kMatrixBytes;
inline constexpr std::uint32_t kWeightedOffset = 2 * kMatrixBytes;
inline constexpr std::uint32_t kPartBytes = 3 * kMatrixBytes;
static_assert(kMaxPartsPerBlock * kPartUnits == schedule::kMaxUnitsPerTile);

/// Rows whose inputs a thread has read ahead of those it works on; they may lie beyond the part.
inline constexpr int kRowsReadAhead = 8;

enum class ProducerWarp { loads_operands = 0, loads_inputs = 1, stores = 2 };

/// Barriers, each named by what is true once its phase completes.
struct Barriers {
  std::uint64_t stage_filled[kNumStages];  ///< both operands of the stage arrived
  std::uint64_t stage_free[kNumStages];    ///< the cluster's math warps are done with the stage
  std::uint64_t inputs_arrived[kNumPartBuffers];   ///< g, u and the rows' weights
  std::uint64_t results_written[kNumPartBuffers];  ///< dg, du and w a
  std::uint64_t part_free[kNumPartBuffers];        ///< the copy engine has read the results
  /// The other warpgroup has issued its last product, and has waited for every earlier fill of
  /// every stage: a parity wait is only right for a thread that knows of all phases before.
  std::uint64_t may_multiply[kNumMathWarpgroups];
  /// The same for the parts: the other warpgroup is done with all of its own.
  std::uint64_t may_use_parts[kNumMathWarpgroups];
};

struct Storage {
  alignas(1024) std::uint8_t stages[kNumStages][kStageBytes];
  alignas(1024) std::uint8_t parts[kNumPartBuffers][kPartBytes];
  alignas(16) float row_weights[kNumPartBuffers][kPartRows + kRowsReadAhead];
  /// Two sets a warpgroup: one is read while the next part's sums are written.
  float dw_warp_sums[kNumMathWarpgroups][2][kWarpsPerWarpgroup][kPartRows];
  Barriers barriers;
  std::int32_t first_tile[kMaxGroups + 1];
};
static_assert(sizeof(Storage) <= 232448, "shared memory of one SM");

/// A part of a tile: 64 channels of up to 48 rows. Parts without rows do not exist for any role.
struct Part {
  int channel;    ///< the first of 64
  int first_row;  ///< within the tile
  int num_units;  ///< of rows
};

MEGAMOE_HOST_DEVICE constexpr int num_parts_per_block(int num_units) {
  return schedule::ceil_div(num_units, kPartUnits);
}

/// Part `part_idx` of block `block` of the tile.
MEGAMOE_HOST_DEVICE constexpr Part part_of(const GroupedTile& tile, int block, int part_idx) {
  const int units = tile.num_units - part_idx * kPartUnits;
  return {tile.channel_tile * kTileChannels + block * kBlockChannels, part_idx * kPartRows,
          units > kPartUnits ? kPartUnits : units};
}

}  // namespace gradient
}  // namespace megamoe::products
