// What every product kernel does before its warps take their roles.
#pragma once

#include "device/barrier.cuh"
#include "kernels/products/tile_shape.h"

namespace megamoe::products {

/// Barrier initialisation by one thread; a cluster barrier must follow before use. `num_grants`
/// warps grant a slot.
__device__ inline void init_barriers(Barriers& barriers, std::uint32_t num_grants = 1) {
  for (int stage = 0; stage < kNumStages; ++stage) {
    device::init_barrier(device::shared_address(&barriers.stage_filled[stage]), 1);
    device::init_barrier(device::shared_address(&barriers.stage_free[stage]), kStageFreeArrivals);
  }
  for (int slot = 0; slot < kMaxSlots; ++slot) {
    device::init_barrier(device::shared_address(&barriers.slot_filled[slot]), kWarpsPerWarpgroup);
    for (auto& granted : barriers.slot_granted)
      device::init_barrier(device::shared_address(&granted[slot]), num_grants);
  }
  device::publish_barrier_init();
}

}  // namespace megamoe::products
