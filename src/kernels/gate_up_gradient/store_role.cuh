// The store warp: dg, du and w a leave from the parts' buffers.
#pragma once

#include "device/barrier.cuh"
#include "device/tma.cuh"
#include "device/trace.cuh"
#include "kernels/gate_up_gradient/load_role.cuh"

namespace megamoe::products::gradient {

template <Gate kGate>
__device__ inline void store_part(const GateUpGradientParams& params, const Part& part, int row,
                                  std::uint32_t buffer) {
  if constexpr (kGate == Gate::present) {
    device::store_tile(&params.dg, buffer, part.channel, row);
  }
  device::store_tile(&params.du, buffer + kUpOffset, part.channel, row);
  device::store_tile(&params.wa, buffer + kWeightedOffset, part.channel, row);
  device::commit_stores();
}

template <Shared kShared, Gate kGate>
__device__ inline void store_role(const GateUpGradientParams& params, Storage& storage,
                                  int cta_rank) {
  const std::uint32_t buffers = device::shared_address(storage.parts);
  const std::uint32_t written = device::shared_address(storage.barriers.results_written);
  const std::uint32_t free = device::shared_address(storage.barriers.part_free);
  GroupedWalk<kShared> walk(params.rows, params.num_channel_tiles, storage.first_tile, cta_rank);
  trace::Recorder recorder(params.trace_region, trace::track_warp_2, 0);
  device::RingPosition<kNumPartBuffers> ring;
  device::RingPosition<kNumPartBuffers> leaving;
  int num_leaving = 0;
  GroupedTile tile;
  while (walk.next(tile)) {
    const trace::Span span(recorder, trace::Event::stores, tile.group, tile.num_units);
#pragma unroll 1
    for (int part_idx = 0; part_idx < num_parts(tile); ++part_idx) {
      const Part part = part_of(tile, part_idx);
      recorder.wait(written + ring.slot * 8U, ring.parity);
      store_part<kGate>(params, part, tile.first_row + part.first_row,
                        buffers + ring.slot * kPartBytes);
      ring.advance();
      if (++num_leaving == kPartsLeaving) {
        device::wait_stores_read<kPartsLeaving - 1>();
        device::arrive(free + leaving.slot * 8U);
        leaving.advance();
        --num_leaving;
      }
    }
  }
  // The last buffers are not given back: there is nothing left to load.
  device::wait_stores_complete<0>();
  device::note_end(params.ends);
}

}  // namespace megamoe::products::gradient
