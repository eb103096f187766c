// How the output pieces of a tile are numbered; piece q goes through slot q % kNumSlots and is
// stored by store warp q % 2.
#pragma once

#include "kernels/products/tile_shape.h"

namespace megamoe::products {

/// The first warpgroup's pieces come first: all slots serve it, then the second, which waits while
/// the first multiplies on.
template <int kPiecesPerWarpgroup, int kSlots = kNumStoreWarps>
struct PieceNumbering {
  static constexpr int kNumSlots = kSlots;
  static constexpr std::uint32_t kSlotBytes = kAllSlotBytes / kSlots;
  static constexpr int kPerWarpgroup = kPiecesPerWarpgroup;
  static constexpr int kPerTile = kNumMathWarpgroups * kPiecesPerWarpgroup;
  static_assert(kSlots <= kMaxSlots && kSlots % kNumStoreWarps == 0);
  static_assert(kPerTile % kSlots == 0, "a slot must hold the same pieces of every tile");

  MEGAMOE_HOST_DEVICE static constexpr int number_of(int warpgroup, int piece) {
    return warpgroup * kPiecesPerWarpgroup + piece;
  }
  MEGAMOE_HOST_DEVICE static constexpr int warpgroup_of(int number) {
    return number / kPiecesPerWarpgroup;
  }
  MEGAMOE_HOST_DEVICE static constexpr int piece_of(int number) {
    return number % kPiecesPerWarpgroup;
  }
  /// Who writes into the slot after piece `number`, possibly of the next tile.
  MEGAMOE_HOST_DEVICE static constexpr int next_warpgroup_of(int number) {
    return warpgroup_of((number + kNumSlots) % kPerTile);
  }
};

}  // namespace megamoe::products
