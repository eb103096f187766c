// The store warps of the weight gradients: as in products/store_role.cuh, with a piece of the
// gradient stored, or added into fp32 (kPiecesBroughtIn).
#pragma once

#include "kernels/products/slot_stores.cuh"
#include "kernels/products/tile_tickets.cuh"
#include "kernels/weight_gradients/gradient_storage.h"
#include "kernels/weight_gradients/gradient_walk.cuh"

namespace megamoe::products {

inline constexpr int kFp32LineElements = 32;  ///< of 128 bytes

/// A piece of an fp32 tile in the gradient.
struct Fp32Piece {
  const CUtensorMap* map;
  int line;
  int sub_tile;  ///< of 32 channels
  int group;

  __device__ Fp32Piece(const WeightGradientParams& params, const GradientTile& tile, int piece)
      : map(&params.jobs[tile.job].gradient[tile.num_blocks - 1]),
        line(tile.first_block * kGradientBlock + piece * tile.num_blocks * kFp32LinesABlock),
        sub_tile(tile.channel_tile *
                 (kGradientTileChannels<GradientType::fp32> / kFp32LineElements)),
        group(tile.group) {}

  __device__ void store(std::uint32_t slot) const {
    device::store_tile(map, slot, 0, line, sub_tile, group);
  }
  __device__ void add(std::uint32_t slot) const {
    device::add_tile(map, slot, 0, line, sub_tile, group);
  }
  __device__ void load(std::uint32_t slot, std::uint32_t arrived) const {
    device::load_tile(slot, map, arrived, 0, line, sub_tile, group);
  }
};

/// One arrival on `granted`, with the bytes that the piece is added to where it is.
__device__ inline void grant_slot(const WeightGradientParams& params, const GradientTile& tile,
                                  int piece, std::uint32_t granted, std::uint32_t slot) {
  if (params.update == GradientUpdate::store || piece >= kPiecesBroughtIn || tile.num_blocks == 0) {
    device::arrive(granted);
    return;
  }
  constexpr std::uint32_t kBytesABlock =
      kFp32LinesABlock * kGradientTileChannels<GradientType::fp32> * sizeof(float);
  device::arrive_expecting(granted, tile.num_blocks * kBytesABlock);
  Fp32Piece(params, tile, piece).load(slot, granted);
}

/// Stores the pieces of tiles of which `may_store(tile)` is true when they are complete.
template <Shared kShared, class MayStore>
__device__ inline void store_bf16_tiles(const WeightGradientParams& params, TogetherStorage& shared,
                                        int cta_rank, int slot_idx, const MayStore& may_store) {
  GradientWalk<kShared, GradientType::bf16, TicketReader<Readers::thread>> walk(
      params, shared.groups, cta_rank, TicketReader<Readers::thread>(shared.tickets));
  trace::Recorder recorder(params.trace_region, trace::track_warp_1 + slot_idx, 0);
  SlotStores<GradientPieces<GradientType::bf16>> stores(shared, slot_idx, recorder);
  GradientTile tile;
  while (walk.next(tile)) {
    if (tile.num_blocks == 0) continue;
    const trace::Span span(recorder, trace::Event::stores, tile.group);
    stores.store_tile_pieces([&](int warpgroup, int piece, std::uint32_t slot) {
      if (!may_store(tile)) return;
      const int channel = tile.channel_tile * kTileChannels +
                          (warpgroup * kBlocksPerWarpgroup + piece) * kBlockChannels;
      device::store_tile(&params.jobs[tile.job].gradient[tile.num_blocks - 1], slot, channel,
                         tile.first_block * kGradientBlock, tile.group);
    });
  }
}

/// The tiles of both warpgroups, in their turns; those without lines have empty pieces.
template <Shared kShared, class MayStore>
__device__ inline void store_fp32_tiles(const WeightGradientParams& params, TurnStorage& shared,
                                        int cta_rank, int slot_idx, const MayStore& may_store) {
  using Pieces = GradientPieces<GradientType::fp32>;
  constexpr int kPieces = Pieces::kPerWarpgroup;
  GradientWalk<kShared, GradientType::fp32, TicketReader<Readers::thread>> walk(
      params, shared.groups, cta_rank, TicketReader<Readers::thread>(shared.tickets));
  trace::Recorder recorder(params.trace_region, trace::track_warp_1 + slot_idx, 0);
  SlotStores<Pieces> stores(shared, slot_idx, recorder);
  GradientTile tile;
  GradientTile next;
  bool has_tile = walk.next(tile);
  if (has_tile && params.update == GradientUpdate::add) {
    grant_slot(params, tile, slot_idx,
               device::shared_address(&shared.barriers.slot_granted[0][slot_idx]),
               device::shared_address(shared.slots) + slot_idx * Pieces::kSlotBytes);
  }
  for (int owner = 0; has_tile; owner = 1 - owner) {
    const trace::Span span(recorder, trace::Event::stores, tile.group);
    const bool has_next = walk.next(next);
    const int first = owner * kPieces;
    const auto store = [&](int /*warpgroup*/, int piece, std::uint32_t slot) {
      if (tile.num_blocks == 0 || !may_store(tile)) return;
      if (params.update == GradientUpdate::add && piece >= kPiecesBroughtIn) {
        Fp32Piece(params, tile, piece).add(slot);
      } else {
        Fp32Piece(params, tile, piece).store(slot);
      }
    };
    const auto grant = [&](int number, std::uint32_t granted, std::uint32_t slot) {
      const int following = number - first + Pieces::kNumSlots;
      if (following < kPieces) {
        grant_slot(params, tile, following, granted, slot);
      } else if (has_next) {
        grant_slot(params, next, following - kPieces, granted, slot);
      }
    };
    stores.store_pieces(first, first + kPieces, store, grant);
    tile = next;
    has_tile = has_next;
  }
}

template <Shared kShared, GradientType kType, class MayStore>
__device__ inline void gradient_store_role(const WeightGradientParams& params,
                                           GradientStorage<kType>& shared, int cta_rank,
                                           int slot_idx, const MayStore& may_store) {
  if constexpr (kType == GradientType::bf16) {
    store_bf16_tiles<kShared>(params, shared, cta_rank, slot_idx, may_store);
  } else {
    store_fp32_tiles<kShared>(params, shared, cta_rank, slot_idx, may_store);
  }
  device::wait_stores_complete<0>();
  if (slot_idx == kNumStoreWarps - 1)
    device::note_end(params.ends);  // it stores a tile's last piece
}

}  // namespace megamoe::products
