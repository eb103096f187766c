// p = dy down, and what the epilogue makes of it: dg, du, w a and the partial dw. What the kernel
// is given.
//
// Channels are I, K is H. The epilogue needs g and u of the whole tile, 192 KB: they travel through
// the same ring of stages as the operands, as four more stages after the last K block, one for each
// warpgroup's block of 64 channels. dg and du are written over g and u and leave from there; w a
// leaves through the output slots.
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

/// Stages that carry g and u of one tile: block by block, the warpgroups alternating, so that both
/// start at once.
inline constexpr int kGradientStages = kNumMathWarpgroups * kBlocksPerWarpgroup;
/// Where u and the rows' weights lie in such a stage; g lies at its start.
inline constexpr std::uint32_t kUpBytes = kSlotBytes;
inline constexpr std::uint32_t kRowWeightBytes = 2 * kSlotBytes;
static_assert(kRowWeightBytes + (kTileRows + 8) * sizeof(float) <= kStageBytes,
              "loads run one step ahead");

struct GateUpGradientStorage {
  SharedStorage base;
  std::uint64_t
      gradients_written[kGradientStages];  ///< dg and du lie in the stage, where g and u were
  float dw_warp_sums[kNumMathWarpgroups][kWarpsPerWarpgroup][kTileRows];
};
static_assert(sizeof(GateUpGradientStorage) <= 232448, "shared memory of one SM");

/// The first of the 64 channels that gradient stage `stage` of a tile is about.
MEGAMOE_HOST_DEVICE constexpr int gradient_stage_channel(int channel_tile, int stage) {
  const int warpgroup = stage % kNumMathWarpgroups;
  const int block = stage / kNumMathWarpgroups;
  return channel_tile * kTileChannels + (warpgroup * kBlocksPerWarpgroup + block) * kBlockChannels;
}

}  // namespace megamoe::products
