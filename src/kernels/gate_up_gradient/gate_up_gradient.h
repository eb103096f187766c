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
  // Boxes of one part each.
  CUtensorMap g;  ///< g and dg are left empty where there is no gate
  CUtensorMap u;
  CUtensorMap dg;
  CUtensorMap du;
  CUtensorMap wa;
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

/// The epilogue works on parts of 64 channels x 16 rows. A part's buffer brings g and u, takes dg
/// and du in their places and w a behind them, and leaves through the copy engine. A buffer is
/// given back when the next part's stores are issued, so that the copy engine always has some to
/// work on. Parts of 48 rows through three buffers are 1 to 3% slower (docs/perf_log.md).
inline constexpr int kPartRows = schedule::kRowsPerUnit;
inline constexpr int kNumPartBuffers = 9;
inline constexpr int kMaxParts = kBlocksPerWarpgroup * schedule::kMaxUnitsPerTile;
inline constexpr int kPartsLeaving = 2;
static_assert(kPartsLeaving < kNumPartBuffers);
inline constexpr std::uint32_t kMatrixBytes = kPartRows * kBlockChannels * 2;
inline constexpr std::uint32_t kUpOffset = kMatrixBytes;
inline constexpr std::uint32_t kWeightedOffset = 2 * kMatrixBytes;
inline constexpr std::uint32_t kPartBytes = 3 * kMatrixBytes;

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
  alignas(16) float row_weights[kNumPartBuffers][kPartRows];
  /// A set for each block of channels: one is read while the next part's sums are written.
  float dw_warp_sums[kNumMathWarpgroups][kBlocksPerWarpgroup][kWarpsPerWarpgroup][kPartRows];
  Barriers barriers;
  std::int32_t first_tile[kMaxGroups + 1];
};
static_assert(sizeof(Storage) <= 232448, "shared memory of one SM");

/// A part of a tile: one of its blocks of channels, one of its units of rows.
struct Part {
  int channel;    ///< the first of 64
  int first_row;  ///< within the tile
};

MEGAMOE_HOST_DEVICE constexpr int num_parts(const GroupedTile& tile) {
  return tile.num_units * kBlocksPerWarpgroup;
}

/// The parts of the same rows follow each other: their lines of g, u and the results are neighbours
/// in memory. One block of channels after the other is 1 to 2% slower (docs/perf_log.md).
MEGAMOE_HOST_DEVICE constexpr Part part_of(const GroupedTile& tile, int part_idx) {
  return {tile.channel_tile * kTileChannels + part_idx % kBlocksPerWarpgroup * kBlockChannels,
          part_idx / kBlocksPerWarpgroup * kPartRows};
}

}  // namespace gradient
}  // namespace megamoe::products
