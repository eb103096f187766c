// The kernel of p and its epilogue: walk and operands of the row products, tiles of one warpgroup.
//
// Read next: gate_up_gradient.h (what), load_role.cuh, math_role.cuh, epilogue.cuh, store_role.cuh.
#pragma once

#include "kernels/gate_up_gradient/load_role.cuh"
#include "kernels/gate_up_gradient/math_role.cuh"
#include "kernels/gate_up_gradient/store_role.cuh"

namespace megamoe::products {
namespace gradient {

/// By one thread; a cluster barrier must follow before use.
__device__ inline void init_barriers(Barriers& barriers) {
  const auto init = [](auto& all, std::uint32_t num_arrivals) {
    for (std::uint64_t& barrier : all)
      device::init_barrier(device::shared_address(&barrier), num_arrivals);
  };
  init(barriers.stage_filled, 1);
  init(barriers.stage_free, kClusterSize * kWarpsPerWarpgroup);
  init(barriers.inputs_arrived, 1);
  init(barriers.results_written, kWarpsPerWarpgroup);
  init(barriers.part_free, 1);
  init(barriers.may_multiply, kWarpsPerWarpgroup);
  init(barriers.may_use_parts, kWarpsPerWarpgroup);
  device::publish_barrier_init();
}

}  // namespace gradient

template <Shared kShared, class Activation>
__global__ void __cluster_dims__(kClusterSize, 1, 1) __launch_bounds__(kNumThreads, 1)
    gate_up_gradient_kernel(const __grid_constant__ GateUpGradientParams params,
                            const __grid_constant__ Activation activation) {
  constexpr gradient::Gate kGate =
      Activation::kGated ? gradient::Gate::present : gradient::Gate::absent;
  extern __shared__ __align__(1024) std::uint8_t shared_bytes[];
  gradient::Storage& storage = *reinterpret_cast<gradient::Storage*>(shared_bytes);
  const trace::Block block(params.trace_region);
  const int warp = device::warp_idx();
  const int cta_rank = static_cast<int>(device::cluster_cta_rank());

  if (warp == 0 && device::elect_one()) gradient::init_barriers(storage.barriers);
  if (warp == 1) count_tiles<kShared>(params.rows, params.num_channel_tiles, storage.first_tile);
  __syncthreads();
  device::cluster_sync();

  if (warp < static_cast<int>(kWarpsPerWarpgroup)) {
    device::release_registers_to<kProducerRegisters>();
    if (device::elect_one()) {
      if (warp == static_cast<int>(gradient::ProducerWarp::loads_operands)) {
        gradient::load_operands_role<kShared>(params, storage, cta_rank);
      } else if (warp == static_cast<int>(gradient::ProducerWarp::loads_inputs)) {
        gradient::load_inputs_role<kShared, kGate>(params, storage, cta_rank);
      } else if (warp == static_cast<int>(gradient::ProducerWarp::stores)) {
        gradient::store_role<kShared, kGate>(params, storage, cta_rank);
      }
    }
    __syncwarp();
  } else {
    device::claim_registers_up_to<kMathRegisters>();
    gradient::math_role<kShared>(params, activation, storage, cta_rank,
                                 warp / static_cast<int>(kWarpsPerWarpgroup) - 1);
  }
  // Neither CTA may leave while the other still signals its barriers or multicasts into its stages.
  device::cluster_sync();
}

}  // namespace megamoe::products
