// The store warp: dg, du and w a leave from the parts' buffers.
#pragma once

#include "device/barrier.cuh"
#include "device/tma.cuh"
#include "device/trace.cuh"
#include "kernels/gate_up_gradient/load_role.cuh"

namespace megamoe::products::gradient {

template <Shared kShared, Gate kGate>
__device__ inline void store_role(const GateUpGradientParams& params, Storage& storage,
                                  int cta_rank) {
  const std::uint32_t buffers = device::shared_address(storage.parts);
  const std::uint32_t written = device::shared_address(storage.barriers.results_written);
  const std::uint32_t free = device::shared_address(storage.barriers.part_free);
  GroupedWalk<kShared> walk(params.rows, params.num_channel_tiles, storage.first_tile, cta_rank);
  trace::Recorder recorder(params.trace_region, trace::track_warp_2, 0);
  device::RingPosition<kNumPartBuffers> ring;
  GroupedTile tile;
  while (walk.next(tile)) {
    const trace::Span span(recorder, trace::Event::stores, tile.group, tile.num_units);
    const int num_parts = num_parts_per_block(tile.num_units);
#pragma unroll 1
    for (int block = 0; block < kBlocksPerWarpgroup; ++block) {
#pragma unroll 1
      for (int part_idx = 0; part_idx < num_parts; ++part_idx) {
        const Part part = part_of(tile, block, part_idx);
        const int map_idx = part.num_units - 1;
        const int row = tile.first_row + part.first_row;
        const std::uint32_t buffer = buffers + ring.slot * kPartBytes;
        recorder.wait(written + ring.slot * 8U, ring.parity);
        if constexpr (kGate == Gate::present) {
          device::store_tile(&params.dg.by_units[map_idx], buffer, part.channel, row);
        }
        device::store_tile(&params.du.by_units[map_idx], buffer + kUpOffset, part.channel, row);
        device::store_tile(&params.wa.by_units[map_idx], buffer + kWeightedOffset, part.channel,
                           row);
        device::commit_stores();
        device::wait_stores_read<0>();
        device::arrive(free + ring.slot * 8U);
        ring.advance();
      }
    }
  }
  device::wait_stores_complete<0>();
  device::note_end(params.ends);
}

}  // namespace megamoe::products::gradient
