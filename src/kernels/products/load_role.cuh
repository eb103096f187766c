// The load warp: one thread fills the stages, each CTA its own operand and its half of the operand
// that the cluster shares.
#pragma once

#include "device/barrier.cuh"
#include "device/tma.cuh"
#include "device/trace.cuh"
#include "kernels/products/grouped_walk.cuh"
#include "kernels/products/math_role.cuh"
#include "kernels/products/operand_layout.cuh"

namespace megamoe::products {

/// The weights' part of a stage: 256 channels x 64 of K.
template <RowProduct kProduct, Shared kShared>
__device__ inline void load_channels(const RowProductParams& params, const GroupedTile& tile,
                                     int k_block, int cta_rank, std::uint32_t stage,
                                     std::uint32_t filled) {
  constexpr std::uint32_t kHalfBytes = kChannelBytes / 2;
  const int channel = tile.channel_tile * kOutputChannels<kProduct>;
  if constexpr (kProduct == RowProduct::dx) {
    const int source = k_block >= params.num_k_blocks_a_source ? 1 : 0;
    const int k = (k_block - source * params.num_k_blocks_a_source) * kBlockK;
    const CUtensorMap* map = &params.weights[source];
    if constexpr (kShared == Shared::rows) {
      device::load_tile(stage, map, filled, 0, k, channel / kBlockK, tile.group);
    } else {
      device::load_tile_multicast(stage + cta_rank * kHalfBytes, map, filled, kBothCtas, 0,
                                  k + cta_rank * (kBlockK / 2), channel / kBlockK, tile.group);
    }
  } else if constexpr (kIsGateUp<kProduct>) {
    if constexpr (kShared == Shared::rows) {
      device::load_tile(stage, &params.weights[0], filled, k_block * kBlockK, channel, tile.group);
      device::load_tile(stage + kHalfBytes, &params.weights[1], filled, k_block * kBlockK, channel,
                        tile.group);
    } else {
      device::load_tile_multicast(stage + cta_rank * kHalfBytes, &params.weights[cta_rank], filled,
                                  kBothCtas, k_block * kBlockK, channel, tile.group);
    }
  } else {
    if constexpr (kShared == Shared::rows) {
      device::load_tile(stage, &params.weights[0], filled, k_block * kBlockK, channel, tile.group);
    } else {
      device::load_tile_multicast(stage + cta_rank * kHalfBytes, &params.weights[0], filled,
                                  kBothCtas, k_block * kBlockK,
                                  channel + cta_rank * (kTileChannels / 2), tile.group);
    }
  }
}

/// The rows' part of a stage: the tile's rows x 64 of K.
template <RowProduct kProduct, Shared kShared>
__device__ inline void load_rows(const RowProductParams& params, const GroupedTile& tile,
                                 int k_block, int cta_rank, std::uint32_t stage,
                                 std::uint32_t filled) {
  int source = 0;
  if constexpr (kProduct == RowProduct::dx) {
    source = k_block >= params.num_k_blocks_a_source ? 1 : 0;
    k_block -= source * params.num_k_blocks_a_source;
  }
  const CUtensorMap* map = &params.row_inputs[source].by_units[tile.num_units - 1];
  const std::uint32_t rows = stage + kChannelBytes;
  if constexpr (kShared == Shared::rows) {
    const int half_rows = tile.num_units * (schedule::kRowsPerUnit / 2);
    device::load_tile_multicast(rows + cta_rank * tile.num_units * (kUnitBytes / 2), map, filled,
                                kBothCtas, k_block * kBlockK,
                                tile.first_row + cta_rank * half_rows);
  } else {
    if (tile.num_units > 0) device::load_tile(rows, map, filled, k_block * kBlockK, tile.first_row);
  }
}

/// Waits until the ring's stage is free, and begins to fill it.
template <RowProduct kProduct, Shared kShared>
__device__ inline void load_stage(const RowProductParams& params, SharedStorage& shared,
                                  const GroupedTile& tile, int k_block, int cta_rank,
                                  StageRing& ring, trace::Recorder& recorder) {
  const std::uint32_t stage = device::shared_address(shared.stages) + ring.slot * kStageBytes;
  const std::uint32_t filled = device::shared_address(&shared.barriers.stage_filled[ring.slot]);
  recorder.wait(device::shared_address(&shared.barriers.stage_free[ring.slot]), ring.parity ^ 1U);
  device::arrive_expecting(filled, kChannelBytes + tile.num_units * kUnitBytes);
  load_channels<kProduct, kShared>(params, tile, k_block, cta_rank, stage, filled);
  load_rows<kProduct, kShared>(params, tile, k_block, cta_rank, stage, filled);
  ring.advance();
}

template <RowProduct kProduct, Shared kShared, class Tickets = EveryNthTile>
__device__ inline void load_role(const RowProductParams& params, SharedStorage& shared,
                                 int cta_rank, Tickets tickets = Tickets()) {
  GroupedWalk<kShared, Tickets> walk(params.rows, params.num_channel_tiles, shared.first_tile,
                                     cta_rank, tickets);
  trace::Recorder recorder(params.trace_region, trace::track_warp_0, 0);
  StageRing ring;
  GroupedTile tile;
  while (walk.next(tile)) {
    const trace::Span span(recorder, trace::Event::loads, tile.group, tile.num_units);
    for (int k_block = 0; k_block < params.num_k_blocks; ++k_block) {
      load_stage<kProduct, kShared>(params, shared, tile, k_block, cta_rank, ring, recorder);
    }
  }
}

}  // namespace megamoe::products
