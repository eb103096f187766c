// The gate_up gradient on dy rows that its own pull warp fetches; x follows, for the weight
// gradients. The kernel of gate_up_gradient/kernel.cuh with a load role that waits for rows, and
// the fourth producer warp pulling.
//
// Read next: pull_role.cuh, arrived_rows.cuh.
#pragma once

#include "kernels/forward/arrived_rows.cuh"
#include "kernels/forward/beside_stages.cuh"
#include "kernels/forward/pull_role.cuh"
#include "kernels/gate_up_gradient/kernel.cuh"

namespace megamoe::products {
namespace gradient {

/// load_operands_role, but for the waiting; `next` as in load_arrived_role.
template <Shared kShared>
__device__ inline void load_arrived_operands_role(const gpu::RankView& view,
                                                  const GateUpGradientParams& params,
                                                  Storage& storage, GroupedTile& next,
                                                  int cta_rank) {
  const std::uint32_t stages = device::shared_address(storage.stages);
  const std::uint32_t filled = device::shared_address(storage.barriers.stage_filled);
  const std::uint32_t free = device::shared_address(storage.barriers.stage_free);
  GroupedWalk<kShared> walk(params.rows, params.num_channel_tiles, storage.first_tile, cta_rank);
  ArrivedRows arrived(view);
  trace::Recorder recorder(params.trace_region, trace::track_warp_0, 0);
  device::RingPosition<kNumStages> ring;
  GroupedTile tile;
  bool has_next = walk.next(tile);
  while (has_next) {
    arrived.await(schedule::blocks_of_cta<kShared>(tile, cta_rank), recorder);
    const trace::Span span(recorder, trace::Event::loads, tile.group, tile.num_units);
    GroupedTile after;
    has_next = walk.next(after);
    if (has_next) next = after;
    const std::uint32_t stage_bytes = kChannelBytes + tile.num_units * kUnitBytes;
    for (int k_block = 0; k_block < params.num_k_blocks; ++k_block) {
      recorder.wait(free + ring.slot * 8U, ring.parity ^ 1U);
      device::arrive_expecting(filled + ring.slot * 8U, stage_bytes);
      load_stage<kShared>(params, tile, k_block, cta_rank, stages + ring.slot * kStageBytes,
                          filled + ring.slot * 8U);
      ring.advance();
      if (has_next && k_block < ArrivedRows::kLooks) {
        arrived.look_ahead(schedule::blocks_of_cta<kShared>(next, cta_rank), k_block);
      }
    }
    tile = next;
  }
}

}  // namespace gradient

template <Shared kShared, class Activation>
__global__ void __cluster_dims__(kClusterSize, 1, 1) __launch_bounds__(kNumThreads, 1)
    gate_up_gradient_and_pull_kernel(const __grid_constant__ GateUpGradientParams params,
                                     const __grid_constant__ Activation activation,
                                     const __grid_constant__ gpu::RankView view,
                                     const __grid_constant__ gpu::PullParams pull_params) {
  constexpr gradient::Gate kGate =
      Activation::kGated ? gradient::Gate::present : gradient::Gate::absent;
  constexpr int kPullWarp = 3;
  extern __shared__ __align__(1024) std::uint8_t shared_bytes[];
  gradient::Storage& storage = *reinterpret_cast<gradient::Storage*>(shared_bytes);
  gpu::PullShared& pull_shared = beside_stages<gradient::Storage, gpu::PullShared>(shared_bytes);
  const trace::Block block(params.trace_region);
  const int warp = device::warp_idx();
  const int cta_rank = static_cast<int>(device::cluster_cta_rank());

  if (warp == 0 && device::elect_one()) {
    gpu::init_pull_barriers(pull_shared);
    gradient::init_barriers(storage.barriers);
  }
  if (warp == 1) count_tiles<kShared>(params.rows, params.num_channel_tiles, storage.first_tile);
  __syncthreads();
  device::cluster_sync();

  if (warp < static_cast<int>(kWarpsPerWarpgroup)) {
    device::release_registers_to<kProducerRegisters>();
    if (warp == kPullWarp) {
      trace::Recorder recorder(params.trace_region, trace::track_warp_3, device::lane_idx());
      gpu::pull_role(view, pull_params, pull_shared, recorder);
    } else if (device::elect_one()) {
      if (warp == static_cast<int>(gradient::ProducerWarp::loads_operands)) {
        gradient::load_arrived_operands_role<kShared>(view, params, storage, pull_shared.next_tile,
                                                      cta_rank);
      } else if (warp == static_cast<int>(gradient::ProducerWarp::loads_inputs)) {
        gradient::load_inputs_role<kShared, kGate>(params, storage, cta_rank);
      } else {
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
