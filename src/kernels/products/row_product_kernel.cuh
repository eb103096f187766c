// The kernel of the row products: sets up barriers and the tile list, then each warp takes its
// role.
//
// Read next: grouped_walk.cuh (which tile), load_role.cuh, math_role.cuh, epilogue.cuh,
// store_role.cuh.
#pragma once

#include "base/activation.h"
#include "device/cluster.cuh"
#include "kernels/products/epilogue.cuh"
#include "kernels/products/load_role.cuh"
#include "kernels/products/math_role.cuh"
#include "kernels/products/setup.cuh"
#include "kernels/products/store_role.cuh"

namespace megamoe::products {

template <RowProduct kProduct, Shared kShared, class Activation, class Tickets = EveryNthTile>
__device__ inline void math_role(const RowProductParams& params, const Activation& activation,
                                 SharedStorage& shared, int cta_rank, int warpgroup,
                                 Tickets tickets = Tickets()) {
  constexpr std::uint32_t kAllUnits = ((1U << (schedule::kMaxUnitsPerTile + 1)) - 1U) & ~1U;
  const std::uint32_t stages = device::shared_address(shared.stages);
  trace::Recorder recorder(params.trace_region, trace::track_math_0 + warpgroup,
                           static_cast<int>(threadIdx.x) % device::kWarpgroupSize);
  const StageBarriers barriers(shared.barriers, recorder);
  GroupedWalk<kShared, Tickets> walk(params.rows, params.num_channel_tiles, shared.first_tile,
                                     cta_rank, tickets);
  PieceWriter<Pieces<kProduct>> writer(shared, warpgroup, recorder);
  StageRing ring;
  GroupedTile tile;
  while (walk.next(tile)) {
    Accumulators acc;
    device::forget_accumulators(acc);
    const int num_units = tile.num_units;
    if (kShared == Shared::channels && num_units == 0) {
      const trace::Span span(recorder, trace::Event::skips);
      skip_tile(barriers, ring, params.num_k_blocks);
      continue;
    }
    {
      const trace::Span span(recorder, trace::Event::main_loop, tile.group, num_units,
                             params.num_k_blocks);
      multiply_units<operand_layout<kProduct, kShared>(), kAllUnits>(
          num_units, acc, stages, warpgroup, barriers, ring, params.num_k_blocks);
    }
    const trace::Span span(recorder, trace::Event::epilogue, tile.group, num_units);
    if constexpr (kIsGateUp<kProduct>) {
      write_activation<kProduct == RowProduct::gate_up_saving>(acc, num_units, activation, writer);
    } else if constexpr (kIsUngatedUp<kProduct>) {
      write_ungated<kProduct == RowProduct::up_saving>(acc, num_units, activation, writer);
    } else {
      write_blocks(acc, num_units, writer);
    }
  }
}

template <RowProduct kProduct, Shared kShared, class Activation = NoActivation>
__global__ void __cluster_dims__(kClusterSize, 1, 1) __launch_bounds__(kNumThreads, 1)
    row_product_kernel(const __grid_constant__ RowProductParams params,
                       const __grid_constant__ Activation activation) {
  extern __shared__ __align__(1024) std::uint8_t shared_bytes[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
  const trace::Block block(params.trace_region);
  const int warp = device::warp_idx();
  const int cta_rank = static_cast<int>(device::cluster_cta_rank());

  if (warp == 0 && device::elect_one()) init_barriers(shared.barriers);
  if (warp == 1) count_tiles<kShared>(params.rows, params.num_channel_tiles, shared.first_tile);
  __syncthreads();
  device::cluster_sync();

  if (warp < static_cast<int>(kWarpsPerWarpgroup)) {
    device::release_registers_to<kProducerRegisters>();
    if (warp == static_cast<int>(ProducerWarp::loads)) {
      if (device::elect_one()) load_role<kProduct, kShared>(params, shared, cta_rank);
    } else if (warp != static_cast<int>(ProducerWarp::idle)) {
      if (device::elect_one()) {
        store_role<kProduct, kShared>(params, shared, cta_rank,
                                      warp - static_cast<int>(ProducerWarp::stores_slot_0));
      }
    }
    __syncwarp();
  } else {
    device::claim_registers_up_to<kMathRegisters>();
    math_role<kProduct, kShared, Activation>(params, activation, shared, cta_rank,
                                             warp / static_cast<int>(kWarpsPerWarpgroup) - 1);
  }
  // Neither CTA may leave while the other still signals its barriers or multicasts into its stages.
  device::cluster_sync();
}

}  // namespace megamoe::products
