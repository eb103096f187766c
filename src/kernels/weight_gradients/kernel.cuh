// The kernel of the weight gradients. Same block, stages and slots as the row products; K is an
// expert's rows.
//
// Read next: weight_gradient.h (what), gradient_walk.cuh (which tile), load_role.cuh,
// ../products/math_role.cuh, store_role.cuh.
#pragma once

#include "kernels/products/epilogue.cuh"
#include "kernels/products/setup.cuh"
#include "kernels/weight_gradients/fp32_epilogue.cuh"
#include "kernels/weight_gradients/load_role.cuh"
#include "kernels/weight_gradients/store_role.cuh"

namespace megamoe::products {

template <Shared kShared, GradientType kType>
__device__ inline void gradient_math_role(const WeightGradientParams& params, SharedStorage& shared,
                                          int cta_rank, int warpgroup) {
  constexpr std::uint32_t kWholeBlocks = 1U << 4 | 1U << 8 | 1U << 12;
  const std::uint32_t stages = device::shared_address(shared.stages);
  const StageBarriers barriers(shared.barriers);
  GradientWalk<kShared> walk(params, cta_rank);
  PieceWriter<GradientPieces<kType>> writer(shared, warpgroup);
  StageRing ring;
  GradientTile tile;
  while (walk.next(tile)) {
    Accumulators acc;
    device::forget_accumulators(acc);
    const int num_units = tile.num_blocks * kUnitsPerGradientBlock;
    if (num_units == 0) {
      skip_tile(barriers, ring, tile.num_k_blocks);
      continue;
    }
    if (tile.num_k_blocks == 0) {
#pragma unroll
      for (int i = 0; i < kAccumulators; ++i) acc[0][i] = acc[1][i] = 0.0F;
    } else {
      multiply_units<gradient_layout<kShared>(), kWholeBlocks, KEnd::ragged>(
          num_units, acc, stages, warpgroup, barriers, ring, tile.num_k_blocks, tile.last_k_steps);
    }
    if constexpr (kType == GradientType::bf16) {
      write_blocks(acc, num_units, writer);
    } else {
      write_fp32_blocks(acc, num_units, writer);
    }
  }
}

template <Shared kShared, GradientType kType>
__global__ void __cluster_dims__(kClusterSize, 1, 1) __launch_bounds__(kNumThreads, 1)
    weight_gradient_kernel(const __grid_constant__ WeightGradientParams params) {
  extern __shared__ __align__(1024) std::uint8_t shared_bytes[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
  if (params.cancelled != nullptr && *params.cancelled != 0) return;  // the same in all CTAs
  const int warp = device::warp_idx();
  const int cta_rank = static_cast<int>(device::cluster_cta_rank());

  if (warp == 0 && device::elect_one()) init_barriers(shared.barriers);
  __syncthreads();
  device::cluster_sync();

  if (warp < static_cast<int>(kWarpsPerWarpgroup)) {
    device::release_registers_to<kProducerRegisters>();
    if (warp == static_cast<int>(ProducerWarp::loads)) {
      if (device::elect_one()) {
        gradient_load_role<kShared>(params, shared, cta_rank, [](const GradientTile&) {});
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
