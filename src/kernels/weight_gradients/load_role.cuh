// The load warp of the weight gradients. Both operands arrive as they lie in memory, K (rows) by K,
// 64 columns a line: whole sub-tiles of 64 rows for the own operand, and one half of the rows each
// for the operand that the cluster shares.
#pragma once

#include "device/barrier.cuh"
#include "device/tma.cuh"
#include "kernels/products/math_role.cuh"
#include "kernels/weight_gradients/gradient_walk.cuh"
#include "kernels/weight_gradients/turns.h"

namespace megamoe::products {

inline constexpr int kHalfBlockK = kBlockK / 2;

template <GradientShared kShared, GradientType kType>
constexpr OperandLayout gradient_layout() {
  constexpr std::uint32_t kSubTile = kGradientBlock * kBlockK * 2;
  using Cluster = GradientCluster<kShared>;
  constexpr std::uint32_t kLineSubTile = Cluster::kSharesLines ? kSubTile / 2 : kSubTile;
  constexpr std::uint32_t kChannelSubTile = Cluster::kSharesChannels ? kSubTile / 2 : kSubTile;
  return {device::Major::mn,
          device::Major::mn,
          kType == GradientType::bf16 ? 2 * kChannelSubTile : 0,  // in turns: the whole tile
          kChannelSubTile,
          Cluster::kSharesChannels ? kGradientChannelBytes<kType> / 2 : kSubTile / 2,
          Cluster::kSharesLines ? kRowBytes / 2 : kSubTile / 2,
          kLineSubTile};
}

/// The stages' barriers: `stage_filled`, `stage_free`.
__device__ inline Barriers& stage_barriers(SharedStorage& shared) { return shared.barriers; }
__device__ inline TurnBarriers& stage_barriers(TurnStorage& shared) { return shared.turns; }

/// `await(tile, recorder)` is called before the tile's first load.
template <GradientShared kShared, GradientType kType, class Await>
__device__ inline void gradient_load_role(const WeightGradientParams& params,
                                          GradientStorage<kType>& shared, int cta_rank,
                                          Await&& await) {
  constexpr bool kInTurns = kType == GradientType::fp32;
  constexpr std::uint32_t kChannels = kGradientChannelBytes<kType>;
  using Cluster = GradientCluster<kShared>;
  const int half_of_channels = Cluster::half_of_channels(cta_rank);
  const int half_of_lines = Cluster::half_of_lines(cta_rank);
  const std::uint32_t stages = device::shared_address(shared.stages);
  const std::uint32_t filled = device::shared_address(stage_barriers(shared).stage_filled);
  const std::uint32_t free = device::shared_address(stage_barriers(shared).stage_free);
  GradientWalk<kShared, kType> walk(params, cta_rank);
  trace::Recorder recorder(params.trace_region, trace::track_warp_0, 0);
  device::RingPosition<kInTurns ? kTurnStages : kNumStages> ring;
  GradientTile tile;
  while (walk.next(tile)) {
    await(tile, recorder);
    const trace::Span span(recorder, trace::Event::loads, tile.group);
    const GradientJob& job = params.jobs[tile.job];
    const CUtensorMap* lines = &job.lines[tile.num_blocks > 0 ? tile.num_blocks - 1 : 0];
    const int channel_block = tile.channel_tile * (kGradientTileChannels<kType> / kGradientBlock);
    const std::uint32_t stage_bytes = kChannels + tile.num_blocks * (kGradientBlock * kBlockK * 2);
    for (int k_block = 0; k_block < tile.num_k_blocks; ++k_block) {
      const std::uint32_t stage =
          stages + ring.slot * static_cast<std::uint32_t>(sizeof(shared.stages[0]));
      const std::uint32_t stage_filled = filled + ring.slot * 8U;
      const int row = tile.first_row + k_block * kBlockK;
      recorder.wait(free + ring.slot * 8U, ring.parity ^ 1U);
      device::arrive_expecting(stage_filled, stage_bytes);
      if constexpr (Cluster::kSharesChannels) {
        device::load_tile_multicast(stage + half_of_channels * (kChannels / 2), &job.channels,
                                    stage_filled, Cluster::ctas_with_channels(cta_rank), 0,
                                    row + half_of_channels * kHalfBlockK, channel_block);
      } else {
        device::load_tile(stage, &job.channels, stage_filled, 0, row, channel_block);
      }
      if (tile.num_blocks > 0) {
        if constexpr (Cluster::kSharesLines) {
          device::load_tile_multicast(stage + kChannels + half_of_lines * (kRowBytes / 2), lines,
                                      stage_filled, Cluster::ctas_with_lines(cta_rank), 0,
                                      row + half_of_lines * kHalfBlockK, tile.first_block);
        } else {
          device::load_tile(stage + kChannels, lines, stage_filled, 0, row, tile.first_block);
        }
      }
      ring.advance();
    }
  }
}

}  // namespace megamoe::products
