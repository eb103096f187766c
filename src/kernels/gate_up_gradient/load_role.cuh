// The load warp: the tile's K blocks of down and dy, then its g and u.
#pragma once

#include "device/barrier.cuh"
#include "device/tma.cuh"
#include "kernels/gate_up_gradient/gate_up_gradient.h"
#include "kernels/products/grouped_walk.cuh"
#include "kernels/products/math_role.cuh"

namespace megamoe::products {

template <Shared kShared>
__device__ inline void load_product_stage(const GateUpGradientParams& params,
                                          const GroupedTile& tile, int k_block, int cta_rank,
                                          std::uint32_t stage, std::uint32_t filled) {
  const int k = k_block * kBlockK;
  const int channel_block = tile.channel_tile * (kTileChannels / kBlockChannels);
  const CUtensorMap* dy = &params.dy.by_units[tile.num_units > 0 ? tile.num_units - 1 : 0];
  const std::uint32_t rows = stage + kChannelBytes;
  if constexpr (kShared == Shared::rows) {
    const int half_rows = tile.num_units * (schedule::kRowsPerUnit / 2);
    device::load_tile(stage, &params.down, filled, 0, k, channel_block, tile.group);
    device::load_tile_multicast(rows + cta_rank * tile.num_units * (kUnitBytes / 2), dy, filled,
                                kBothCtas, k, tile.first_row + cta_rank * half_rows);
  } else {
    device::load_tile_multicast(stage + cta_rank * (kChannelBytes / 2), &params.down, filled,
                                kBothCtas, 0, k + cta_rank * (kBlockK / 2), channel_block,
                                tile.group);
    if (tile.num_units > 0) device::load_tile(rows, dy, filled, k, tile.first_row);
  }
}

/// g, u and the rows' weights of one gradient stage.
__device__ inline void load_gradient_stage(const GateUpGradientParams& params,
                                           const GroupedTile& tile, int gradient_stage,
                                           std::uint32_t stage, std::uint32_t filled) {
  const GradientPart part = gradient_part(tile.channel_tile, tile.num_units, 0, gradient_stage);
  const std::uint32_t weight_bytes = part.num_units * (schedule::kRowsPerUnit * sizeof(float));
  const std::uint32_t part_bytes = 2 * part.num_units * kUnitBytes;
  device::arrive_expecting(filled, kNumMathWarpgroups * part_bytes + weight_bytes);
  if (part.num_units == 0) return;
  const int row = tile.first_row + part.first_row;
  const CUtensorMap* g = &params.g.by_units[part.num_units - 1];
  const CUtensorMap* u = &params.u.by_units[part.num_units - 1];
#pragma unroll
  for (int warpgroup = 0; warpgroup < kNumMathWarpgroups; ++warpgroup) {
    const int channel = part.channel + warpgroup * kBlocksPerWarpgroup * kBlockChannels;
    const std::uint32_t shared = stage + warpgroup * kWarpgroupPartBytes;
    device::load_tile(shared, g, filled, channel, row);
    device::load_tile(shared + kUpBytes, u, filled, channel, row);
  }
  device::load_bytes(stage + kRowWeightBytes, params.row_weights + row, weight_bytes, filled);
}

template <Shared kShared>
__device__ inline void gate_up_gradient_load_role(const GateUpGradientParams& params,
                                                  SharedStorage& shared, int cta_rank) {
  const std::uint32_t stages = device::shared_address(shared.stages);
  const std::uint32_t filled = device::shared_address(shared.barriers.stage_filled);
  const std::uint32_t free = device::shared_address(shared.barriers.stage_free);
  GroupedWalk<kShared> walk(params.rows, params.num_channel_tiles, shared.first_tile, cta_rank);
  StageRing ring;
  GroupedTile tile;
  while (walk.next(tile)) {
    const std::uint32_t stage_bytes = kChannelBytes + tile.num_units * kUnitBytes;
    for (int k_block = 0; k_block < params.num_k_blocks; ++k_block) {
      device::wait(free + ring.slot * 8U, ring.parity ^ 1U);
      device::arrive_expecting(filled + ring.slot * 8U, stage_bytes);
      load_product_stage<kShared>(params, tile, k_block, cta_rank, stages + ring.slot * kStageBytes,
                                  filled + ring.slot * 8U);
      ring.advance();
    }
#pragma unroll 1
    for (int gradient_stage = 0; gradient_stage < kGradientStages; ++gradient_stage) {
      device::wait(free + ring.slot * 8U, ring.parity ^ 1U);
      load_gradient_stage(params, tile, gradient_stage, stages + ring.slot * kStageBytes,
                          filled + ring.slot * 8U);
      ring.advance();
    }
  }
}

}  // namespace megamoe::products
