// The two math warpgroups. They take the tiles of their CTA in turn and walk the same list: each
// computes every second tile and skips what the other uses of the rings.
#pragma once

#include "kernels/gate_up_gradient/epilogue.cuh"
#include "kernels/products/math_role.cuh"

namespace megamoe::products::gradient {

/// As dx reads its weights, but two blocks of 64 channels a stage, which both belong to the one
/// warpgroup that multiplies.
template <Shared kShared>
constexpr OperandLayout stage_layout() {
  OperandLayout layout = operand_layout<RowProduct::dx, kShared>();
  layout.warpgroup_bytes = 0;
  if (kShared == Shared::channels) layout.channel_k_half_bytes = kChannelBytes / 2;
  return layout;
}

/// One warpgroup's view of the barriers.
struct MathBarriers {
  std::uint32_t stage_filled;
  std::uint32_t stage_free_there;  ///< in the CTA that this lane signals (lanes 0 and 1)
  std::uint32_t inputs_arrived;
  std::uint32_t results_written;
  std::uint32_t may_multiply;         ///< this warpgroup's
  std::uint32_t other_may_multiply;   ///< the other's
  std::uint32_t may_use_parts;        ///< this warpgroup's
  std::uint32_t other_may_use_parts;  ///< the other's
  trace::Recorder& recorder;

  __device__ MathBarriers(Barriers& barriers, int warpgroup, trace::Recorder& this_recorder)
      : stage_filled(device::shared_address(barriers.stage_filled)),
        stage_free_there(device::cluster_address(device::shared_address(barriers.stage_free),
                                                 device::lane_idx() % kClusterSize)),
        inputs_arrived(device::shared_address(barriers.inputs_arrived)),
        results_written(device::shared_address(barriers.results_written)),
        may_multiply(device::shared_address(&barriers.may_multiply[warpgroup])),
        other_may_multiply(device::shared_address(&barriers.may_multiply[1 - warpgroup])),
        may_use_parts(device::shared_address(&barriers.may_use_parts[warpgroup])),
        other_may_use_parts(device::shared_address(&barriers.may_use_parts[1 - warpgroup])),
        recorder(this_recorder) {}

  __device__ void release_stage(std::uint32_t stage) const {
    if (device::lane_idx() < kClusterSize) device::arrive_reads_over(stage_free_there + stage * 8U);
  }
};

/// One arrival for each warp.
__device__ inline void arrive_warp(std::uint32_t barrier) {
  if (device::lane_idx() == 0) device::arrive(barrier);
}

using StagePosition = SharedRing<kNumStages>;
using PartPosition = SharedRing<kNumPartBuffers>;

/// acc = the tile's whole chain over K. One group of products stays in flight, and the other
/// warpgroup's follow as soon as the last are issued.
template <int kN, Shared kShared>
__device__ inline void multiply_rows(Accumulators& acc, std::uint32_t stages,
                                     const MathBarriers& barriers, StagePosition ring,
                                     int num_k_blocks) {
  constexpr OperandLayout kLayout = stage_layout<kShared>();
  const std::uint64_t channels = device::tile_descriptor(stages);
  const std::uint64_t rows =
      device::tile_descriptor(stages + kChannelBytes, kLayout.row_atom_bytes);
  std::uint32_t previous = 0;
  for (int k_block = 0; k_block < num_k_blocks; ++k_block) {
    barriers.recorder.wait_for_block(k_block, barriers.stage_filled + ring.slot * 8U, ring.parity);
    multiply_stage<kN, kKStepsPerBlock, kLayout>(
        acc, device::advance_descriptor(channels, ring.slot * kStageBytes),
        device::advance_descriptor(rows, ring.slot * kStageBytes), k_block > 0);
    device::wgmma_wait<1>();
    if (k_block > 0) barriers.release_stage(previous);
    previous = ring.slot;
    ring.advance();
  }
  arrive_warp(barriers.other_may_multiply);
  device::wgmma_wait<0>();
  device::pin_accumulators(acc);
  barriers.release_stage(previous);
}

/// A CTA without rows still has to give the shared channels' stages back.
__device__ inline void skip_stages(const MathBarriers& barriers, StagePosition ring,
                                   int num_k_blocks) {
  for (int k_block = 0; k_block < num_k_blocks; ++k_block) {
    barriers.recorder.wait_for_block(k_block, barriers.stage_filled + ring.slot * 8U, ring.parity);
    __syncwarp();
    barriers.release_stage(ring.slot);
    ring.advance();
  }
  arrive_warp(barriers.other_may_multiply);
}

template <Shared kShared>
__device__ inline void multiply_tile_rows(int num_units, Accumulators& acc, std::uint32_t stages,
                                          const MathBarriers& barriers, const StagePosition& ring,
                                          int num_k_blocks) {
  switch (num_units) {
#define MEGAMOE_UNITS(units)                                                            \
  case units:                                                                           \
    multiply_rows<(units)*schedule::kRowsPerUnit, kShared>(acc, stages, barriers, ring, \
                                                           num_k_blocks);               \
    break
    MEGAMOE_UNITS(1);
    MEGAMOE_UNITS(2);
    MEGAMOE_UNITS(3);
    MEGAMOE_UNITS(4);
    MEGAMOE_UNITS(5);
    MEGAMOE_UNITS(6);
    MEGAMOE_UNITS(7);
    MEGAMOE_UNITS(8);
    MEGAMOE_UNITS(9);
    MEGAMOE_UNITS(10);
    MEGAMOE_UNITS(11);
    MEGAMOE_UNITS(12);
#undef MEGAMOE_UNITS
    default:
      skip_stages(barriers, ring, num_k_blocks);
      break;
  }
}

/// Named barriers 1 and 2: the warps of one math warpgroup have written, or have read, their sums.
__device__ inline void sync_warpgroup(int warpgroup) {
  // Constant numbers: with one in a register the compiler reserves all sixteen barriers.
  if (warpgroup == 0) {
    asm volatile("bar.sync 1, %0;" ::"n"(device::kWarpgroupSize) : "memory");
  } else {
    asm volatile("bar.sync 2, %0;" ::"n"(device::kWarpgroupSize) : "memory");
  }
}

/// The epilogue of a tile. Unrolled, 90 KB of code that both warpgroups share: with code of its own
/// for each it was 200 KB, and the instruction cache made it several times as slow; rolled, moving
/// accumulators to the front, it spilled (docs/perf_log.md).
template <class Activation>
__device__ inline void write_tile(const GateUpGradientParams& params, const Activation& activation,
                                  Storage& storage, const MathBarriers& barriers, int warpgroup,
                                  const GroupedTile& tile, const Accumulators& acc,
                                  PartPosition ring) {
  const int lane = device::lane_idx();
  const int warp = static_cast<int>(threadIdx.x) % device::kWarpgroupSize / device::kWarpSize;
  // Lane l addresses line l % 8 of block l / 8 % 2, which is channels 8..15 of the warp where odd.
  const std::uint32_t lane_offset = device::swizzled_offset(
      static_cast<std::uint32_t>(lane & 7), static_cast<std::uint32_t>(warp * 2 + (lane >> 3 & 1)));
  const int lane_row = lane % 4 * 2 + lane / 16;
#pragma unroll
  for (int part_idx = 0; part_idx < kMaxParts; ++part_idx) {
    if (part_idx >= num_parts(tile)) break;
    const int block = part_idx % kBlocksPerWarpgroup;
    const int unit = part_idx / kBlocksPerWarpgroup;
    const Part part = part_of(tile, part_idx);
    const std::uint32_t buffer = device::shared_address(storage.parts) + ring.slot * kPartBytes;
    auto& warp_sums = storage.dw_warp_sums[warpgroup][block];
    barriers.recorder.wait(barriers.inputs_arrived + ring.slot * 8U, ring.parity);
    write_part(
        &acc[block][unit * kPartRows / 2],
        {buffer + lane_offset,
         device::shared_address(storage.row_weights) +
             ring.slot * static_cast<std::uint32_t>(sizeof(storage.row_weights[0])) + lane % 4 * 8,
         device::shared_address(&warp_sums[warp][lane_row])},
        activation);
    const int num_rows = tile.num_rows - part.first_row;
    if (num_rows < kPartRows) zero_pad_rows(buffer, num_rows);
    device::fence_async_shared();
    __syncwarp();
    arrive_warp(barriers.results_written + ring.slot * 8U);
    // Also after every warp has read the sums of the part before, whose set the next one writes.
    sync_warpgroup(warpgroup);
    write_dw_segment(params, tile, part, warp_sums);
    ring.advance();
  }
}

template <Shared kShared, class Activation>
__device__ inline void math_role(const GateUpGradientParams& params, const Activation& activation,
                                 Storage& storage, int cta_rank, int warpgroup) {
  const std::uint32_t stages = device::shared_address(storage.stages);
  trace::Recorder recorder(params.trace_region, trace::track_math_0 + warpgroup,
                           static_cast<int>(threadIdx.x) % device::kWarpgroupSize);
  const MathBarriers barriers(storage.barriers, warpgroup, recorder);
  GroupedWalk<kShared> walk(params.rows, params.num_channel_tiles, storage.first_tile, cta_rank);
  StagePosition stage_ring;
  PartPosition part_ring;
  // The first warpgroup begins: it waits for the phase before the first, which counts as completed.
  std::uint32_t turn_parity = warpgroup == 0 ? 1 : 0;
  int owner = 0;
  GroupedTile tile;
  while (walk.next(tile)) {
    if (owner == warpgroup) {
      Accumulators acc;
      device::forget_accumulators(acc);
      {
        const trace::Span span(recorder, trace::Event::awaits_turn);
        recorder.wait(barriers.may_multiply, turn_parity);
      }
      {
        const trace::Span span(recorder, trace::Event::main_loop, tile.group, tile.num_units,
                               params.num_k_blocks);
        multiply_tile_rows<kShared>(tile.num_units, acc, stages, barriers, stage_ring,
                                    params.num_k_blocks);
      }
      {
        const trace::Span span(recorder, trace::Event::awaits_parts);
        recorder.wait(barriers.may_use_parts, turn_parity);
      }
      const trace::Span span(recorder, trace::Event::epilogue, tile.group, tile.num_units);
      write_tile(params, activation, storage, barriers, warpgroup, tile, acc, part_ring);
      arrive_warp(barriers.other_may_use_parts);
      turn_parity ^= 1U;
    }
    owner = 1 - owner;
    stage_ring.skip(params.num_k_blocks);
    part_ring.skip(num_parts(tile));
  }
}

}  // namespace megamoe::products::gradient
