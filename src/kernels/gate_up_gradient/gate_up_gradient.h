// p = dy down, and what the epilogue makes of it: dg, du, w a and the partial dw. What the kernel
// is given.
//
// Channels are I, K is H. The epilogue needs g and u of the whole tile, 192 KB: they travel through
// the same ring of stages as the operands, as four more stages after the last K block. Each carries
// half of the tile's rows of one block of 64 channels for each warpgroup, so that both work on
// every stage and the next stages arrive meanwhile. dg and du are written over g and u and leave
// from there; w a leaves through the output slots.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "kernels/products/row_product.h"

namespace megamoe::products {

struct GateUpGradientParams {
  CUtensorMap down;
  RowMaps dy;
  RowMaps g;
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
};

inline constexpr int kHalves = 2;
inline constexpr int kHalfUnits = schedule::kMaxUnitsPerTile / kHalves;
inline constexpr int kHalfRows = kHalfUnits * schedule::kRowsPerUnit;
inline constexpr std::uint32_t kHalfBytes = kHalfRows * kBlockChannels * 2;

/// Stages that carry g and u of one tile: blocks of 64 channels, and of each its rows in halves.
inline constexpr int kGradientStages = kBlocksPerWarpgroup * kHalves;

/// w a: one piece for each stage and warpgroup, through two slots for each warpgroup. With one the
/// next stage waited a microsecond for the copy engine.
using WeightedPieces = PieceNumbering<PieceOrder::warpgroups_alternate, kGradientStages, 4>;
static_assert(WeightedPieces::kSlotBytes == kHalfBytes);

/// Where a warpgroup's u lies behind its g, the second warpgroup's part behind the first's, and the
/// rows' weights at the end.
inline constexpr std::uint32_t kUpBytes = kHalfBytes;
inline constexpr std::uint32_t kWarpgroupPartBytes = 2 * kHalfBytes;
inline constexpr std::uint32_t kRowWeightBytes = kNumMathWarpgroups * kWarpgroupPartBytes;
static_assert(kRowWeightBytes + (kHalfRows + 8) * sizeof(float) <= kStageBytes,
              "loads run one step ahead");

struct GateUpGradientStorage {
  SharedStorage base;
  std::uint64_t gradients_written[kGradientStages];  ///< dg and du lie where g and u were
  float dw_warp_sums[kNumMathWarpgroups][kWarpsPerWarpgroup][kTileRows];
};
static_assert(sizeof(GateUpGradientStorage) <= 232448, "shared memory of one SM");

/// What one warpgroup finds in gradient stage `stage` of a tile.
struct GradientPart {
  int channel;    ///< the first of 64
  int first_row;  ///< within the tile
  int num_units;  ///< of rows; 0 in the second half of a small tile
};

MEGAMOE_HOST_DEVICE constexpr GradientPart gradient_part(int channel_tile, int num_units,
                                                         int warpgroup, int stage) {
  const int block = stage / kHalves;
  const int half = stage % kHalves;
  const int channel =
      channel_tile * kTileChannels + (warpgroup * kBlocksPerWarpgroup + block) * kBlockChannels;
  const int units = half == 0 ? num_units : num_units - kHalfUnits;
  return {channel, half * kHalfRows, units < 0 ? 0 : (units > kHalfUnits ? kHalfUnits : units)};
}

}  // namespace megamoe::products
