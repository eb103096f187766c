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
    const std::uint32_t row_bytes = tile.num_units * kUnitBytes;
    const std::uint32_t weight_bytes = tile.num_units * (schedule::kRowsPerUnit * sizeof(float));
    for (int k_block = 0; k_block < params.num_k_blocks; ++k_block) {
      device::wait(free + ring.slot * 8U, ring.parity ^ 1U);
      device::arrive_expecting(filled + ring.slot * 8U, kChannelBytes + row_bytes);
      load_product_stage<kShared>(params, tile, k_block, cta_rank, stages + ring.slot * kStageBytes,
                                  filled + ring.slot * 8U);
      ring.advance();
    }
    for (int gradient_stage = 0; gradient_stage < kGradientStages; ++gradient_stage) {
      const std::uint32_t stage = stages + ring.slot * kStageBytes;
      device::wait(free + ring.slot * 8U, ring.parity ^ 1U);
      device::arrive_expecting(filled + ring.slot * 8U, 2 * row_bytes + weight_bytes);
      if (tile.num_units > 0) {
        const int channel = gradient_stage_channel(tile.channel_tile, gradient_stage);
        device::load_tile(stage, &params.g.by_units[tile.num_units - 1], filled + ring.slot * 8U,
                          channel, tile.first_row);
        device::load_tile(stage + kUpBytes, &params.u.by_units[tile.num_units - 1],
                          filled + ring.slot * 8U, channel, tile.first_row);
        device::load_bytes(stage + kRowWeightBytes, params.row_weights + tile.first_row,
                           weight_bytes, filled + ring.slot * 8U);
      }
      ring.advance();
    }
  }
}

}  // namespace megamoe::products
