// The load warp of the weight gradients. Both operands arrive as they lie in memory, K (rows) by K,
// 64 columns a line: whole sub-tiles of 64 rows for the own operand, and one half of the rows each
// for the operand that the cluster shares.
#pragma once

#include "device/barrier.cuh"
#include "device/tma.cuh"
#include "kernels/products/math_role.cuh"
#include "kernels/products/tile_tickets.cuh"
#include "kernels/weight_gradients/gradient_storage.h"
#include "kernels/weight_gradients/gradient_walk.cuh"

namespace megamoe::products {

inline constexpr int kHalfBlockK = kBlockK / 2;

template <Shared kShared, GradientType kType>
constexpr OperandLayout gradient_layout() {
  constexpr std::uint32_t kSubTile = kGradientBlock * kBlockK * 2;
  constexpr bool kRowsShared = kShared == Shared::rows;
  constexpr std::uint32_t kChannelSubTile = kRowsShared ? kSubTile : kSubTile / 2;
  return {device::Major::mn,
          device::Major::mn,
          kType == GradientType::bf16 ? 2 * kChannelSubTile : 0,  // in turns: the whole tile
          kChannelSubTile,
          kRowsShared ? kSubTile / 2 : kGradientChannelBytes<kType> / 2,
          kRowsShared ? kRowBytes / 2 : kSubTile / 2,
          kRowsShared ? kSubTile / 2 : kSubTile};
}

/// The stages' barriers: `stage_filled`, `stage_free`.
__device__ inline Barriers& stage_barriers(TogetherStorage& shared) { return shared.barriers; }
__device__ inline TurnBarriers& stage_barriers(TurnStorage& shared) { return shared.turns; }

/// `await(tile, recorder)` is called before the tile's first load.
template <Shared kShared, GradientType kType, class Await>
__device__ inline void gradient_load_role(const WeightGradientParams& params,
                                          GradientStorage<kType>& shared, int cta_rank,
                                          Await&& await) {
  constexpr bool kInTurns = kType == GradientType::fp32;
  constexpr std::uint32_t kChannels = kGradientChannelBytes<kType>;
  const std::uint32_t stages = device::shared_address(shared.stages);
  const std::uint32_t filled = device::shared_address(stage_barriers(shared).stage_filled);
  const std::uint32_t free = device::shared_address(stage_barriers(shared).stage_free);
  GradientWalk<kShared, kType, TicketDealer> walk(params, shared.groups, cta_rank,
                                                  {shared.tickets, params.num_tiles_taken});
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
      const int half_row = row + cta_rank * kHalfBlockK;
      recorder.wait(free + ring.slot * 8U, ring.parity ^ 1U);
      device::arrive_expecting(stage_filled, stage_bytes);
      if constexpr (kShared == Shared::rows) {
        device::load_tile(stage, &job.channels, stage_filled, 0, row, channel_block);
        device::load_tile_multicast(stage + kChannels + cta_rank * (kRowBytes / 2), lines,
                                    stage_filled, kBothCtas, 0, half_row, tile.first_block);
      } else {
        device::load_tile_multicast(stage + cta_rank * (kChannels / 2), &job.channels, stage_filled,
                                    kBothCtas, 0, half_row, channel_block);
        if (tile.num_blocks > 0)
          device::load_tile(stage + kChannels, lines, stage_filled, 0, row, tile.first_block);
      }
      ring.advance();
    }
  }
}

}  // namespace megamoe::products
