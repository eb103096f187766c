// The store warps of the weight gradients: as in products/store_role.cuh, with a piece of the
// gradient stored, or added into fp32.
#pragma once

#include "kernels/products/slot_stores.cuh"
#include "kernels/weight_gradients/gradient_walk.cuh"
#include "kernels/weight_gradients/turns.h"

namespace megamoe::products {

inline constexpr int kFp32LineElements = 32;  ///< of 128 bytes

template <GradientType kType>
__device__ inline void store_gradient_piece(const WeightGradientParams& params,
                                            const GradientTile& tile, int warpgroup, int piece,
                                            std::uint32_t slot) {
  const CUtensorMap* map = &params.jobs[tile.job].gradient[tile.num_blocks - 1];
  const int line = tile.first_block * kGradientBlock;
  if constexpr (kType == GradientType::bf16) {
    const int channel = tile.channel_tile * kTileChannels +
                        (warpgroup * kBlocksPerWarpgroup + piece) * kBlockChannels;
    device::store_tile(map, slot, channel, line, tile.group);
  } else {
    const int channel =
        tile.channel_tile * kGradientTileChannels<kType> + piece / 2 * kBlockChannels;
    const int half_line = line + piece % 2 * tile.num_blocks * (kGradientBlock / 2);
    if (params.update == GradientUpdate::add) {
      device::add_tile(map, slot, 0, half_line, channel / kFp32LineElements, tile.group);
    } else {
      device::store_tile(map, slot, 0, half_line, channel / kFp32LineElements, tile.group);
    }
  }
}

/// Stores the pieces of tiles of which `may_store(tile)` is true when they are complete.
template <Shared kShared, GradientType kType, class MayStore>
__device__ inline void gradient_store_role(const WeightGradientParams& params,
                                           GradientStorage<kType>& shared, int cta_rank,
                                           int slot_idx, const MayStore& may_store) {
  GradientWalk<kShared> walk(params, cta_rank);
  SlotStores<GradientPieces<kType>> stores(shared, slot_idx);
  GradientTile tile;
  int owner = 0;
  while (walk.next(tile)) {
    const auto store = [&](int warpgroup, int piece, std::uint32_t slot) {
      if (tile.num_blocks > 0 && may_store(tile)) {
        store_gradient_piece<kType>(params, tile, warpgroup, piece, slot);
      }
    };
    if constexpr (kType == GradientType::bf16) {
      if (tile.num_blocks > 0) stores.store_tile_pieces(store);
    } else {
      // One warpgroup's pieces; those of a tile without lines are empty.
      constexpr int kPieces = kNumGradientPieces<kType>;
      stores.store_pieces(owner * kPieces, (owner + 1) * kPieces, store);
      owner = 1 - owner;
    }
  }
  device::wait_stores_complete<0>();
}

}  // namespace megamoe::products
