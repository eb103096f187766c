// The store warps, one for each output slot: hand a finished piece to the copy engine, and the slot
// back once it has been read.
//
// A warp of their own waits for the copy engine, so that the math warps never do. Pieces are
// numbered over the whole kernel; piece q lies in slot q % 2. Within a tile the first warpgroup's
// pieces come first: it goes on to multiply the next tile while the second warpgroup still waits
// for a slot, so the tensor cores keep work.
#pragma once

#include "device/barrier.cuh"
#include "device/tma.cuh"
#include "kernels/products/grouped_walk.cuh"
#include "kernels/products/operand_layout.cuh"

namespace megamoe::products {

template <RowProduct kProduct>
__device__ inline void store_piece(const RowProductParams& params, const GroupedTile& tile,
                                   int warpgroup, int piece, std::uint32_t slot) {
  const int map_idx = kIsGateUp<kProduct> ? piece : 0;
  const int block = kIsGateUp<kProduct> ? warpgroup : warpgroup * kBlocksPerWarpgroup + piece;
  const int channel = tile.channel_tile * kOutputChannels<kProduct> + block * kBlockChannels;
  device::store_tile(&params.outputs[map_idx].by_units[tile.num_units - 1], slot, channel,
                     tile.first_row);
}

template <RowProduct kProduct, Shared kShared>
__device__ inline void store_role(const RowProductParams& params, SharedStorage& shared,
                                  int cta_rank, int slot_idx) {
  constexpr int kPiecesPerTile = kNumMathWarpgroups * kPieces<kProduct>;
  static_assert(kPiecesPerTile % kNumSlots == 0, "a slot must hold the same pieces of every tile");
  const std::uint32_t slot = device::shared_address(shared.slots[slot_idx]);
  const std::uint32_t filled = device::shared_address(&shared.barriers.slot_filled[slot_idx]);
  const std::uint32_t free = device::shared_address(&shared.barriers.slot_free[slot_idx]);
  GroupedWalk<kShared> walk(params.rows, params.num_channel_tiles, shared.first_tile, cta_rank);
  std::uint32_t parity = 0;
  GroupedTile tile;
  while (walk.next(tile)) {
    if (tile.num_units == 0) continue;
    for (int q = slot_idx; q < kPiecesPerTile; q += kNumSlots) {
      device::wait(filled, parity);
      parity ^= 1U;
      store_piece<kProduct>(params, tile, q / kPieces<kProduct>, q % kPieces<kProduct>, slot);
      device::commit_stores();
      device::wait_stores_read<0>();
      device::arrive(free);
    }
  }
  device::wait_stores_complete<0>();
}

}  // namespace megamoe::products
