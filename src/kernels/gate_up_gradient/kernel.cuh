// The kernel of p and its epilogue. Same block, stages and walk as the row products; g and u pass
// through the stage ring.
//
// Read next: gate_up_gradient.h (what), load_role.cuh, ../products/math_role.cuh, epilogue.cuh,
// store_role.cuh.
#pragma once

#include "kernels/gate_up_gradient/epilogue.cuh"
#include "kernels/gate_up_gradient/load_role.cuh"
#include "kernels/gate_up_gradient/store_role.cuh"
#include "kernels/products/operand_layout.cuh"
#include "kernels/products/setup.cuh"

namespace megamoe::products {

/// Named barriers 1 and 2: the warps of one math warpgroup have written, or have read, their sums.
__device__ inline void sync_warpgroup(int warpgroup) {
  // Constant numbers: with one in a register the compiler reserves all sixteen barriers.
  if (warpgroup == 0) {
    asm volatile("bar.sync 1, %0;" ::"n"(device::kWarpgroupSize) : "memory");
  } else {
    asm volatile("bar.sync 2, %0;" ::"n"(device::kWarpgroupSize) : "memory");
  }
}

template <Shared kShared, class Activation>
__device__ inline void gate_up_gradient_math_role(const GateUpGradientParams& params,
                                                  const Activation& activation,
                                                  GateUpGradientStorage& storage, int cta_rank,
                                                  int warpgroup) {
  constexpr std::uint32_t kAllUnits = ((1U << (schedule::kMaxUnitsPerTile + 1)) - 1U) & ~1U;
  SharedStorage& shared = storage.base;
  const std::uint32_t stages = device::shared_address(shared.stages);
  const std::uint32_t written = device::shared_address(storage.gradients_written);
  const StageBarriers barriers(shared.barriers);
  const int warp = static_cast<int>(threadIdx.x) % device::kWarpgroupSize / device::kWarpSize;
  const int lane_row = device::lane_idx() % 4 * 2 + device::lane_idx() / 16;
  const std::uint32_t sums =
      device::shared_address(&storage.dw_warp_sums[warpgroup][warp][lane_row]);
  GroupedWalk<kShared> walk(params.rows, params.num_channel_tiles, shared.first_tile, cta_rank);
  PieceWriter<WeightedPieces> writer(shared, warpgroup);
  StageRing ring;
  GroupedTile tile;
  while (walk.next(tile)) {
    Accumulators acc;
    device::forget_accumulators(acc);
    if (kShared == Shared::channels && tile.num_units == 0) {
      skip_tile(barriers, ring, params.num_k_blocks + kGradientStages);
      continue;
    }
    // dx reads its weights in the same layout.
    multiply_units<operand_layout<RowProduct::dx, kShared>(), kAllUnits>(
        tile.num_units, acc, stages, warpgroup, barriers, ring, params.num_k_blocks);
    // Unrolled, 90 KB of code that both warpgroups run side by side. With code of its own for each
    // warpgroup it was 200 KB, and the instruction cache made it several times as slow; rolled,
    // moving accumulators to the front, it spilled (docs/perf_log.md).
#pragma unroll
    for (int block = 0; block < kBlocksPerWarpgroup; ++block) {
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        const int gradient_stage = block * kHalves + half;
        const GradientPart part =
            gradient_part(tile.channel_tile, tile.num_units, warpgroup, gradient_stage);
        const std::uint32_t stage = stages + ring.slot * kStageBytes;
        const std::uint32_t gradients = stage + warpgroup * kWarpgroupPartBytes;
        device::wait(barriers.filled + ring.slot * 8U, ring.parity);
        const std::uint32_t weighted = writer.begin_slot(gradient_stage);
        write_gradient_part(
            &acc[block][half * kHalfRows / 2], part.num_units,
            {gradients + writer.lane_offset(), weighted + writer.lane_offset(),
             stage + kRowWeightBytes + device::lane_idx() % 4 * 8, sums + part.first_row * 4},
            activation);
        const int num_rows = tile.num_rows - part.first_row;
        const int end_row = part.num_units * schedule::kRowsPerUnit;
        if (num_rows < end_row) zero_pad_rows(gradients, weighted, max(num_rows, 0), end_row);
        writer.end(gradient_stage);
        if (device::lane_idx() == 0) device::arrive(written + gradient_stage * 8U);
        // One barrier a part: the halves' sums lie apart, and the other half's barrier lies between
        // two uses of the same place.
        sync_warpgroup(warpgroup);
        write_dw_segment(params, tile, part, storage.dw_warp_sums[warpgroup]);
        ring.advance();
      }
    }
  }
}

template <Shared kShared, class Activation>
__global__ void __cluster_dims__(kClusterSize, 1, 1) __launch_bounds__(kNumThreads, 1)
    gate_up_gradient_kernel(const __grid_constant__ GateUpGradientParams params,
                            const __grid_constant__ Activation activation) {
  extern __shared__ __align__(1024) std::uint8_t shared_bytes[];
  GateUpGradientStorage& storage = *reinterpret_cast<GateUpGradientStorage*>(shared_bytes);
  SharedStorage& shared = storage.base;
  const int warp = device::warp_idx();
  const int cta_rank = static_cast<int>(device::cluster_cta_rank());

  if (warp == 0 && device::elect_one()) {
    for (std::uint64_t& barrier : storage.gradients_written) {
      device::init_barrier(device::shared_address(&barrier),
                           kNumMathWarpgroups * kWarpsPerWarpgroup);
    }
    init_barriers(shared.barriers);
  }
  if (warp == 1) count_tiles<kShared>(params.rows, params.num_channel_tiles, shared.first_tile);
  __syncthreads();
  device::cluster_sync();

  if (warp < static_cast<int>(kWarpsPerWarpgroup)) {
    device::release_registers_to<kProducerRegisters>();
    if (device::elect_one()) {
      if (warp == static_cast<int>(ProducerWarp::loads)) {
        gate_up_gradient_load_role<kShared>(params, shared, cta_rank);
      } else if (warp == static_cast<int>(ProducerWarp::stores_gradients)) {
        store_gradients_role<kShared>(params, storage, cta_rank);
      } else {
        store_weighted_role<kShared>(params, shared, cta_rank,
                                     warp - static_cast<int>(ProducerWarp::stores_slot_0));
      }
    }
    __syncwarp();
  } else {
    device::claim_registers_up_to<kMathRegisters>();
    gate_up_gradient_math_role<kShared>(params, activation, storage, cta_rank,
                                        warp / static_cast<int>(kWarpsPerWarpgroup) - 1);
  }
  // Neither CTA may leave while the other still signals its barriers or multicasts into its stages.
  device::cluster_sync();
}

}  // namespace megamoe::products
