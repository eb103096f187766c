// The loop of a store warp, one for each output slot: hand a finished piece to the copy engine, and
// grant the slot to the next writer once it has been read.
//
// A warp of their own waits for the copy engine, so that the math warps never do.
#pragma once

#include "device/barrier.cuh"
#include "device/tma.cuh"
#include "device/trace.cuh"
#include "kernels/products/pieces.h"

namespace megamoe::products {

/// `store(warpgroup, piece, slot address)` issues the copies of one piece. The kernel calls
/// wait_stores_complete at its end.
template <class Pieces>
class SlotStores {
 public:
  template <class Storage>
  __device__ SlotStores(Storage& shared, int store_warp, trace::Recorder& recorder)
      : slots_(device::shared_address(shared.slots)),
        store_warp_(store_warp),
        barriers_(shared.barriers),
        recorder_(recorder) {}

  template <class Store>
  __device__ void store_tile_pieces(const Store& store) {
    store_pieces(
        0, Pieces::kPerTile, store,
        [](int /*number*/, std::uint32_t granted, std::uint32_t) { device::arrive(granted); });
  }
  /// Those with numbers from `first`, an even one, to `end`. `grant(number, barrier, slot address)`
  /// passes the slot of piece `number` on: one arrival on the barrier.
  template <class Store, class Grant>
  __device__ void store_pieces(int first, int end, const Store& store, const Grant& grant) {
#pragma unroll 1
    for (int number = first + store_warp_; number < end; number += kNumStoreWarps) {
      const int slot = number % Pieces::kNumSlots;
      recorder_.wait(device::shared_address(&barriers_.slot_filled[slot]), parities_ >> slot & 1U);
      parities_ ^= 1U << slot;
      store(Pieces::warpgroup_of(number), Pieces::piece_of(number),
            slots_ + slot * Pieces::kSlotBytes);
      device::commit_stores();
      device::wait_stores_read<0>();
      grant(
          number,
          device::shared_address(&barriers_.slot_granted[Pieces::next_warpgroup_of(number)][slot]),
          slots_ + slot * Pieces::kSlotBytes);
    }
  }

 private:
  std::uint32_t slots_;
  int store_warp_;
  std::uint32_t parities_ = 0;
  Barriers& barriers_;
  trace::Recorder& recorder_;
};

}  // namespace megamoe::products
