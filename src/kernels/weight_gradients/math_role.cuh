// The math warpgroups of the weight gradients: both on one tile (bf16), or each on its own in turns
// (fp32).
#pragma once

#include "kernels/products/epilogue.cuh"
#include "kernels/products/shared_ring.h"
#include "kernels/weight_gradients/fp32_epilogue.cuh"
#include "kernels/weight_gradients/load_role.cuh"

namespace megamoe::products {

inline constexpr std::uint32_t kWholeGradientBlocks = 1U << 4 | 1U << 8 | 1U << 12;

__device__ inline void zero_accumulators(Accumulators& acc) {
#pragma unroll
  for (int i = 0; i < kAccumulators; ++i) acc[0][i] = acc[1][i] = 0.0F;
}

template <Shared kShared>
__device__ inline void multiply_together(const WeightGradientParams& params,
                                         TogetherStorage& shared, int cta_rank, int warpgroup) {
  constexpr OperandLayout kLayout = gradient_layout<kShared, GradientType::bf16>();
  const std::uint32_t stages = device::shared_address(shared.stages);
  trace::Recorder recorder(params.trace_region, trace::track_math_0 + warpgroup,
                           static_cast<int>(threadIdx.x) % device::kWarpgroupSize);
  const StageBarriers barriers(shared.barriers, recorder);
  GradientWalk<kShared, GradientType::bf16, TicketReader<Readers::warp>> walk(
      params, shared.groups, cta_rank, TicketReader<Readers::warp>(shared.tickets));
  PieceWriter<GradientPieces<GradientType::bf16>> writer(shared, warpgroup, recorder);
  StageRing ring;
  GradientTile tile;
  while (walk.next(tile)) {
    Accumulators acc;
    device::forget_accumulators(acc);
    const int num_units = tile.num_blocks * kUnitsPerGradientBlock;
    if (num_units == 0) {
      const trace::Span span(recorder, trace::Event::skips);
      skip_tile(barriers, ring, tile.num_k_blocks);
      continue;
    }
    {
      const trace::Span span(recorder, trace::Event::main_loop, tile.group, num_units,
                             tile.num_k_blocks);
      if (tile.num_k_blocks == 0) {
        zero_accumulators(acc);
      } else {
        multiply_units<kLayout, kWholeGradientBlocks, KEnd::ragged>(
            num_units, acc, stages, warpgroup, barriers, ring, tile.num_k_blocks,
            tile.last_k_steps);
      }
    }
    const trace::Span span(recorder, trace::Event::epilogue, tile.group, num_units);
    write_blocks(acc, num_units, writer);
  }
}

/// One warpgroup's view of the barriers.
struct TurnStages {
  static constexpr std::uint32_t kBytes = kTurnStageBytes;
  static constexpr std::uint32_t kRowsOffset = kGradientChannelBytes<GradientType::fp32>;

  std::uint32_t filled;
  std::uint32_t free_there;  ///< in the CTA that this lane signals (lanes 0 and 1 of each warp)
  std::uint32_t may_multiply;
  std::uint32_t other_may_multiply;
  trace::Recorder& recorder;

  __device__ TurnStages(TurnBarriers& barriers, int warpgroup, trace::Recorder& this_recorder)
      : filled(device::shared_address(barriers.stage_filled)),
        free_there(device::cluster_address(device::shared_address(barriers.stage_free),
                                           device::lane_idx() % kClusterSize)),
        may_multiply(device::shared_address(&barriers.may_multiply[warpgroup])),
        other_may_multiply(device::shared_address(&barriers.may_multiply[1 - warpgroup])),
        recorder(this_recorder) {}

  template <class Ring>
  __device__ void await_filled(const Ring& ring, int k_block) const {
    recorder.wait_for_block(k_block, filled + ring.slot * 8U, ring.parity);
  }
  __device__ void release(std::uint32_t stage) const {
    if (device::lane_idx() < kClusterSize) device::arrive_reads_over(free_there + stage * 8U);
  }
  __device__ void end_turn() const {
    if (device::lane_idx() == 0) device::arrive(other_may_multiply);
  }
};

template <Shared kShared>
__device__ inline void multiply_in_turns(const WeightGradientParams& params, TurnStorage& shared,
                                         int cta_rank, int warpgroup) {
  constexpr OperandLayout kLayout = gradient_layout<kShared, GradientType::fp32>();
  const std::uint32_t stages = device::shared_address(shared.stages);
  trace::Recorder recorder(params.trace_region, trace::track_math_0 + warpgroup,
                           static_cast<int>(threadIdx.x) % device::kWarpgroupSize);
  const TurnStages barriers(shared.turns, warpgroup, recorder);
  GradientWalk<kShared, GradientType::fp32, TicketReader<Readers::warp>> walk(
      params, shared.groups, cta_rank, TicketReader<Readers::warp>(shared.tickets));
  PieceWriter<GradientPieces<GradientType::fp32>> writer(
      shared, warpgroup, recorder,
      params.update == GradientUpdate::add ? FirstGrant::awaited : FirstGrant::given);
  SharedRing<kTurnStages> ring;
  // The first warpgroup begins: it waits for the phase before the first, which counts as completed.
  std::uint32_t turn_parity = warpgroup == 0 ? 1 : 0;
  int owner = 0;
  GradientTile tile;
  while (walk.next(tile)) {
    if (owner == warpgroup) {
      const int num_units = tile.num_blocks * kUnitsPerGradientBlock;
      SharedRing<kTurnStages> at = ring;
      {
        const trace::Span span(recorder, trace::Event::awaits_turn);
        recorder.wait(barriers.may_multiply, turn_parity);
      }
      if (num_units == 0) {
        const trace::Span span(recorder, trace::Event::skips);
        skip_tile(barriers, at, tile.num_k_blocks);
        writer.write_nothing();
      } else if (tile.num_k_blocks == 0) {
        barriers.end_turn();
        write_fp32_zeros(tile.num_blocks, writer);
      } else {
        Accumulators acc;
        device::forget_accumulators(acc);
        {
          const trace::Span span(recorder, trace::Event::main_loop, tile.group, num_units,
                                 tile.num_k_blocks);
          multiply_units<kLayout, kWholeGradientBlocks, KEnd::ragged>(
              num_units, acc, stages, /*warpgroup=*/0, barriers, at, tile.num_k_blocks,
              tile.last_k_steps);
        }
        const trace::Span span(recorder, trace::Event::epilogue, tile.group, num_units);
        write_fp32_blocks(acc, tile.num_blocks, params.update, writer);
      }
      turn_parity ^= 1U;
    }
    owner = 1 - owner;
    ring.skip(tile.num_k_blocks);
  }
}

template <Shared kShared, GradientType kType>
__device__ inline void gradient_math_role(const WeightGradientParams& params,
                                          GradientStorage<kType>& shared, int cta_rank,
                                          int warpgroup) {
  if constexpr (kType == GradientType::bf16) {
    multiply_together<kShared>(params, shared, cta_rank, warpgroup);
  } else {
    multiply_in_turns<kShared>(params, shared, cta_rank, warpgroup);
  }
}

}  // namespace megamoe::products
