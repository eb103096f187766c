// The loop of a store warp, one for each output slot: hand a finished piece to the copy engine, and
// grant the slot to the next writer once it has been read.
//
// A warp of their own waits for the copy engine, so that the math warps never do.
#pragma once

#include "device/barrier.cuh"
#include "device/tma.cuh"
#include "kernels/products/pieces.h"

namespace megamoe::products {

/// `store(warpgroup, piece, slot address)` issues the copies of one piece. The kernel calls
/// wait_stores_complete at its end.
template <class Pieces>
class SlotStores {
 public:
  __device__ SlotStores(SharedStorage& shared, int slot_idx)
      : slot_(device::shared_address(shared.slots[slot_idx])),
        filled_(device::shared_address(&shared.barriers.slot_filled[slot_idx])),
        slot_idx_(slot_idx),
        barriers_(shared.barriers) {}

  template <class Store>
  __device__ void store_tile_pieces(const Store& store) {
    for (int number = slot_idx_; number < Pieces::kPerTile; number += kNumSlots) {
      device::wait(filled_, parity_);
      parity_ ^= 1U;
      store(Pieces::warpgroup_of(number), Pieces::piece_of(number), slot_);
      device::commit_stores();
      device::wait_stores_read<0>();
      device::arrive(device::shared_address(
          &barriers_.slot_granted[Pieces::next_warpgroup_of(number)][slot_idx_]));
    }
  }

 private:
  std::uint32_t slot_;
  std::uint32_t filled_;
  int slot_idx_;
  std::uint32_t parity_ = 0;
  Barriers& barriers_;
};

}  // namespace megamoe::products
