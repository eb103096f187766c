// The store warps: dg and du leave from the stages they were computed in, w a from the output
// slots.
#pragma once

#include "device/barrier.cuh"
#include "device/tma.cuh"
#include "kernels/gate_up_gradient/gate_up_gradient.h"
#include "kernels/products/grouped_walk.cuh"
#include "kernels/products/math_role.cuh"
#include "kernels/products/slot_stores.cuh"

namespace megamoe::products {

/// A stage is free again once the copy engine has read dg and du from it; this warp speaks for all
/// math warps of the CTA.
template <Shared kShared>
__device__ inline void store_gradients_role(const GateUpGradientParams& params,
                                            GateUpGradientStorage& storage, int cta_rank) {
  SharedStorage& shared = storage.base;
  const std::uint32_t stages = device::shared_address(shared.stages);
  const std::uint32_t written = device::shared_address(storage.gradients_written);
  const std::uint32_t free = device::shared_address(shared.barriers.stage_free);
  const std::uint32_t free_there[kClusterSize] = {device::cluster_address(free, 0),
                                                  device::cluster_address(free, 1)};
  GroupedWalk<kShared> walk(params.rows, params.num_channel_tiles, shared.first_tile, cta_rank);
  std::uint32_t slot = 0;
  std::uint32_t parity = 0;
  GroupedTile tile;
  while (walk.next(tile)) {
    slot = (slot + params.num_k_blocks) % kNumStages;
    if (tile.num_units == 0) {
      slot = (slot + kGradientStages) % kNumStages;
      continue;
    }
#pragma unroll 1
    for (int gradient_stage = 0; gradient_stage < kGradientStages; ++gradient_stage) {
      device::wait(written + gradient_stage * 8U, parity);
      const GradientPart part = gradient_part(tile.channel_tile, tile.num_units, 0, gradient_stage);
      if (part.num_units > 0) {
        const CUtensorMap* dg = &params.dg.by_units[part.num_units - 1];
        const CUtensorMap* du = &params.du.by_units[part.num_units - 1];
        const int row = tile.first_row + part.first_row;
#pragma unroll
        for (int warpgroup = 0; warpgroup < kNumMathWarpgroups; ++warpgroup) {
          const int channel = part.channel + warpgroup * kBlocksPerWarpgroup * kBlockChannels;
          const std::uint32_t from = stages + slot * kStageBytes + warpgroup * kWarpgroupPartBytes;
          device::store_tile(dg, from, channel, row);
          device::store_tile(du, from + kUpBytes, channel, row);
        }
        device::commit_stores();
        device::wait_stores_read<0>();
      }
      for (const std::uint32_t barrier : free_there) {
        device::arrive_reads_over(barrier + slot * 8U, kNumMathWarpgroups * kWarpsPerWarpgroup);
      }
      slot = (slot + 1) % kNumStages;
    }
    parity ^= 1U;
  }
  device::wait_stores_complete<0>();
}

template <Shared kShared>
__device__ inline void store_weighted_role(const GateUpGradientParams& params,
                                           SharedStorage& shared, int cta_rank, int slot_idx) {
  GroupedWalk<kShared> walk(params.rows, params.num_channel_tiles, shared.first_tile, cta_rank);
  SlotStores<WeightedPieces> stores(shared, slot_idx);
  GroupedTile tile;
  while (walk.next(tile)) {
    if (tile.num_units == 0) continue;
    stores.store_tile_pieces([&](int warpgroup, int gradient_stage, std::uint32_t slot) {
      const GradientPart part =
          gradient_part(tile.channel_tile, tile.num_units, warpgroup, gradient_stage);
      if (part.num_units == 0) return;
      device::store_tile(&params.wa.by_units[part.num_units - 1], slot, part.channel,
                         tile.first_row + part.first_row);
    });
  }
  device::wait_stores_complete<0>();
}

}  // namespace megamoe::products
