// The two load warps: one fills the stages with K blocks of down and dy, one the parts' buffers
// with g, u and the rows' weights.
#pragma once

#include "device/barrier.cuh"
#include "device/tma.cuh"
#include "device/trace.cuh"
#include "kernels/gate_up_gradient/gate_up_gradient.h"
#include "kernels/products/grouped_walk.cuh"

namespace megamoe::products::gradient {

template <Shared kShared>
__device__ inline void load_stage(const GateUpGradientParams& params, const GroupedTile& tile,
                                  int k_block, int cta_rank, std::uint32_t stage,
                                  std::uint32_t filled) {
  const int k = k_block * kBlockK;
  const int channel_block = tile.channel_tile * kBlocksPerWarpgroup;
  const CUtensorMap* dy = &params.dy.by_units[tile.num_units > 0 ? tile.num_units - 1 : 0];
  const std::uint32_t rows = stage + kChannelBytes;
  if constexpr (kShared == Shared::rows) {
    const int half_rows = tile.num_units * (schedule::kRowsPerUnit / 2);
    device::load_tile(stage, &params.down, filled, 0, k, channel_block, tile.group);
    device::load_tile_multicast(rows + cta_rank * tile.num_units * (kUnitBytes / 2), dy, filled,
                                kBothCtas, k, tile.first_row + cta_rank * half_rows);
  } else {
    device::load_tile_multicast(stage + cta_rank * (kChannelBytes / 2), &params.down, filled,
                                kBothCtas, 0, k + cta_rank * (kBlockK / 2), channel_block,
                                tile.group);
    if (tile.num_units > 0) device::load_tile(rows, dy, filled, k, tile.first_row);
  }
}

template <Shared kShared>
__device__ inline void load_operands_role(const GateUpGradientParams& params, Storage& storage,
                                          int cta_rank) {
  const std::uint32_t stages = device::shared_address(storage.stages);
  const std::uint32_t filled = device::shared_address(storage.barriers.stage_filled);
  const std::uint32_t free = device::shared_address(storage.barriers.stage_free);
  GroupedWalk<kShared> walk(params.rows, params.num_channel_tiles, storage.first_tile, cta_rank);
  trace::Recorder recorder(params.trace_region, trace::track_warp_0, 0);
  device::RingPosition<kNumStages> ring;
  GroupedTile tile;
  while (walk.next(tile)) {
    const trace::Span span(recorder, trace::Event::loads, tile.group, tile.num_units);
    const std::uint32_t stage_bytes = kChannelBytes + tile.num_units * kUnitBytes;
    for (int k_block = 0; k_block < params.num_k_blocks; ++k_block) {
      recorder.wait(free + ring.slot * 8U, ring.parity ^ 1U);
      device::arrive_expecting(filled + ring.slot * 8U, stage_bytes);
      load_stage<kShared>(params, tile, k_block, cta_rank, stages + ring.slot * kStageBytes,
                          filled + ring.slot * 8U);
      ring.advance();
    }
  }
}

enum class Gate { present, absent };

template <Gate kGate>
__device__ inline void load_part(const GateUpGradientParams& params, const Part& part, int row,
                                 std::uint32_t buffer, std::uint32_t weights,
                                 std::uint32_t arrived) {
  constexpr std::uint32_t kNumMatrices = kGate == Gate::present ? 2 : 1;
  constexpr std::uint32_t kWeightBytes = kPartRows * sizeof(float);
  device::arrive_expecting(arrived, kNumMatrices * kMatrixBytes + kWeightBytes);
  if constexpr (kGate == Gate::present) {
    device::load_tile(buffer, &params.g, arrived, part.channel, row);
  }
  device::load_tile(buffer + kUpOffset, &params.u, arrived, part.channel, row);
  device::load_bytes(weights, params.row_weights + row, kWeightBytes, arrived);
}

template <Shared kShared, Gate kGate>
__device__ inline void load_inputs_role(const GateUpGradientParams& params, Storage& storage,
                                        int cta_rank) {
  const std::uint32_t buffers = device::shared_address(storage.parts);
  const std::uint32_t weights = device::shared_address(storage.row_weights);
  const std::uint32_t arrived = device::shared_address(storage.barriers.inputs_arrived);
  const std::uint32_t free = device::shared_address(storage.barriers.part_free);
  GroupedWalk<kShared> walk(params.rows, params.num_channel_tiles, storage.first_tile, cta_rank);
  trace::Recorder recorder(params.trace_region, trace::track_warp_1, 0);
  device::RingPosition<kNumPartBuffers> ring;
  GroupedTile tile;
  while (walk.next(tile)) {
    const trace::Span span(recorder, trace::Event::loads, tile.group, tile.num_units);
#pragma unroll 1
    for (int part_idx = 0; part_idx < num_parts(tile); ++part_idx) {
      const Part part = part_of(tile, part_idx);
      recorder.wait(free + ring.slot * 8U, ring.parity ^ 1U);
      load_part<kGate>(
          params, part, tile.first_row + part.first_row, buffers + ring.slot * kPartBytes,
          weights + ring.slot * sizeof(storage.row_weights[0]), arrived + ring.slot * 8U);
      ring.advance();
    }
  }
}

}  // namespace megamoe::products::gradient
