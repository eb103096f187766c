// The store warps of the row products, one for each output slot.
//
// Within a tile the first warpgroup's pieces come first: it goes on to multiply the next tile while
// the second warpgroup still waits for a slot, so the tensor cores keep work.
#pragma once

#include "device/barrier.cuh"
#include "device/tma.cuh"
#include "kernels/products/grouped_walk.cuh"
#include "kernels/products/operand_layout.cuh"
#include "kernels/products/slot_stores.cuh"

namespace megamoe::products {

template <RowProduct kProduct>
__device__ inline void store_piece(const RowProductParams& params, const GroupedTile& tile,
                                   int warpgroup, int piece, std::uint32_t slot) {
  // up_saving has two pieces of u, then two of a; the others' pieces are blocks, or outputs.
  const int map_idx = kIsGateUp<kProduct> ? piece : piece / kBlocksPerWarpgroup;
  const int block = kIsGateUp<kProduct>
                        ? warpgroup
                        : warpgroup * kBlocksPerWarpgroup + piece % kBlocksPerWarpgroup;
  const int channel = tile.channel_tile * kOutputChannels<kProduct> + block * kBlockChannels;
  device::store_tile(&params.outputs[map_idx].by_units[tile.num_units - 1], slot, channel,
                     tile.first_row);
}

template <RowProduct kProduct, Shared kShared>
__device__ inline void store_role(const RowProductParams& params, SharedStorage& shared,
                                  int cta_rank, int slot_idx) {
  GroupedWalk<kShared> walk(params.rows, params.num_channel_tiles, shared.first_tile, cta_rank);
  trace::Recorder recorder(params.trace_region, trace::track_warp_1 + slot_idx, 0);
  SlotStores<Pieces<kProduct>> stores(shared, slot_idx, recorder);
  GroupedTile tile;
  while (walk.next(tile)) {
    if (tile.num_units == 0) continue;
    const trace::Span span(recorder, trace::Event::stores, tile.group, tile.num_units);
    stores.store_tile_pieces([&](int warpgroup, int piece, std::uint32_t slot) {
      store_piece<kProduct>(params, tile, warpgroup, piece, slot);
    });
  }
  device::wait_stores_complete<0>();
  if (slot_idx == kNumStoreWarps - 1)
    device::note_end(params.ends);  // it stores a tile's last piece
}

}  // namespace megamoe::products
