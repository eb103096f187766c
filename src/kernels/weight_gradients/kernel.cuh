// The kernel of the weight gradients; K is an expert's rows. To bf16: same block, stages and slots
// as the row products; to fp32: tiles of one warpgroup (turns.h).
//
// Read next: weight_gradient.h (what), gradient_walk.cuh (which tile), load_role.cuh,
// math_role.cuh, store_role.cuh.
#pragma once

#include "kernels/products/setup.cuh"
#include "kernels/weight_gradients/gradient_groups.cuh"
#include "kernels/weight_gradients/load_role.cuh"
#include "kernels/weight_gradients/math_role.cuh"
#include "kernels/weight_gradients/store_role.cuh"

namespace megamoe::products {

inline constexpr std::uint32_t kGradientTicketReaders = num_ticket_readers(1 + kNumStoreWarps);

/// By one thread; a cluster barrier must follow before use.
__device__ inline void init_gradient_barriers(TogetherStorage& shared) {
  init_ticket_barriers(shared.tickets, kGradientTicketReaders);
  init_barriers(shared.barriers);
}
__device__ inline void init_gradient_barriers(TurnStorage& shared) {
  init_ticket_barriers(shared.tickets, kGradientTicketReaders);
  for (std::uint64_t& filled : shared.turns.stage_filled) {
    device::init_barrier(device::shared_address(&filled), 1);
  }
  for (std::uint64_t& free : shared.turns.stage_free) {
    device::init_barrier(device::shared_address(&free), kClusterSize * kWarpsPerWarpgroup);
  }
  for (std::uint64_t& turn : shared.turns.may_multiply) {
    device::init_barrier(device::shared_address(&turn), kWarpsPerWarpgroup);
  }
  init_barriers(shared.barriers);
}

template <Shared kShared, GradientType kType>
__global__ void __cluster_dims__(kClusterSize, 1, 1) __launch_bounds__(kNumThreads, 1)
    weight_gradient_kernel(const __grid_constant__ WeightGradientParams params) {
  extern __shared__ __align__(1024) std::uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<GradientStorage<kType>*>(shared_bytes);
  if (params.cancelled != nullptr && *params.cancelled != 0) return;  // the same in all CTAs
  const trace::Block block(params.trace_region);
  const int warp = device::warp_idx();
  const int cta_rank = static_cast<int>(device::cluster_cta_rank());

  if (warp == 0 && device::elect_one()) init_gradient_barriers(shared);
  if (warp == 1) list_groups(params, shared.groups);
  __syncthreads();
  device::cluster_sync();

  if (warp < static_cast<int>(kWarpsPerWarpgroup)) {
    device::release_registers_to<kProducerRegisters>();
    if (warp == static_cast<int>(ProducerWarp::loads)) {
      if (device::elect_one()) {
        gradient_load_role<kShared, kType>(params, shared, cta_rank,
                                           [](const GradientTile&, trace::Recorder&) {});
      }
    } else if (warp != static_cast<int>(ProducerWarp::idle)) {
      if (device::elect_one()) {
        gradient_store_role<kShared, kType>(params, shared, cta_rank,
                                            warp - static_cast<int>(ProducerWarp::stores_slot_0),
                                            [](const GradientTile&) { return true; });
      }
    }
    __syncwarp();
  } else {
    device::claim_registers_up_to<kMathRegisters>();
    gradient_math_role<kShared, kType>(params, shared, cta_rank,
                                       warp / static_cast<int>(kWarpsPerWarpgroup) - 1);
  }
  // Neither CTA may leave while the other still signals its barriers or multicasts into its stages.
  device::cluster_sync();
}

}  // namespace megamoe::products
