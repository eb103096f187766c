// The two math warpgroups: wait for a stage, multiply, hand it back, and at the tile's end pass the
// accumulators to the epilogue.
#pragma once

#include <cstdint>

#include "device/barrier.cuh"
#include "device/cluster.cuh"
#include "device/trace.cuh"
#include "device/wgmma.cuh"
#include "kernels/products/operand_layout.cuh"

namespace megamoe::products {

using StageRing = device::RingPosition<kNumStages>;

/// The math warps' view of the stage ring.
struct StageBarriers {
  static constexpr std::uint32_t kBytes = kStageBytes;  ///< of a stage
  static constexpr std::uint32_t kRowsOffset = kChannelBytes;
  std::uint32_t filled;  ///< of stage 0, in this CTA
  std::uint32_t
      free_there;  ///< of stage 0, in the CTA that this lane signals (lanes 0 and 1 of each warp)
  trace::Recorder& recorder;

  __device__ StageBarriers(Barriers& barriers, trace::Recorder& this_recorder)
      : filled(device::shared_address(barriers.stage_filled)),
        free_there(device::cluster_address(device::shared_address(barriers.stage_free),
                                           device::lane_idx() % kClusterSize)),
        recorder(this_recorder) {}

  template <class Ring>
  __device__ void await_filled(const Ring& ring, int k_block) const {
    recorder.wait_for_block(k_block, filled + ring.slot * 8U, ring.parity);
  }
  __device__ void release(std::uint32_t stage) const {
    if (device::lane_idx() < kClusterSize) device::arrive_reads_over(free_there + stage * 8U);
  }
  /// The tile's last products are issued.
  __device__ void end_turn() const {}
};

/// The wgmmas of the first `kNumKSteps` steps of one stage, as one group. No branch may lie between
/// them: the compiler would put a wait in front of each (ptxas C7519).
template <int kN, int kNumKSteps, OperandLayout kLayout>
__device__ inline void multiply_stage(Accumulators& acc, std::uint64_t channels, std::uint64_t rows,
                                      bool accumulate) {
  device::wgmma_begin_group();
#pragma unroll
  for (int k_step = 0; k_step < kNumKSteps; ++k_step) {
#pragma unroll
    for (int block = 0; block < kBlocksPerWarpgroup; ++block) {
      const std::uint64_t a = device::advance_descriptor(
          channels, block * kLayout.block_bytes +
                        k_offset(kLayout.channel_major, kLayout.channel_k_half_bytes, k_step));
      const std::uint64_t b = device::advance_descriptor(
          rows, k_offset(kLayout.row_major, kLayout.row_k_half_bytes, k_step));
      device::wgmma<kN, kLayout.channel_major, kLayout.row_major>(acc[block], a, b,
                                                                  accumulate || k_step > 0);
    }
  }
  device::wgmma_end_group();
}

enum class KEnd {
  whole,   ///< K is a multiple of 64
  ragged,  ///< the last K block may hold 16, 32 or 48
};

/// acc = the tile's whole chain over K. Stage k is given back once stage k + 1's products are
/// issued: one group stays in flight.
template <int kN, KEnd kEnd, OperandLayout kLayout, class Barriers, class Ring>
__device__ inline void multiply_tile(Accumulators& acc, std::uint32_t stages, int warpgroup,
                                     const Barriers& barriers, Ring& ring, int num_k_blocks,
                                     int last_k_steps) {
  const std::uint64_t channels =
      device::tile_descriptor(stages + warpgroup * kLayout.warpgroup_bytes);
  const std::uint64_t rows =
      device::tile_descriptor(stages + Barriers::kRowsOffset, kLayout.row_atom_bytes);
  const auto multiply = [&]<int kNumKSteps>(bool accumulate) {
    multiply_stage<kN, kNumKSteps, kLayout>(
        acc, device::advance_descriptor(channels, ring.slot * Barriers::kBytes),
        device::advance_descriptor(rows, ring.slot * Barriers::kBytes), accumulate);
  };
  std::uint32_t previous = 0;
  const int num_whole =
      kEnd == KEnd::ragged && last_k_steps != kKStepsPerBlock ? num_k_blocks - 1 : num_k_blocks;
  for (int k_block = 0; k_block < num_whole; ++k_block) {
    barriers.await_filled(ring, k_block);
    multiply.template operator()<kKStepsPerBlock>(k_block > 0);
    device::wgmma_wait<1>();
    if (k_block > 0) barriers.release(previous);
    previous = ring.slot;
    ring.advance();
  }
  if (kEnd == KEnd::ragged && num_whole != num_k_blocks) {
    barriers.await_filled(ring, num_whole);
    switch (last_k_steps) {
      case 1:
        multiply.template operator()<1>(num_whole > 0);
        break;
      case 2:
        multiply.template operator()<2>(num_whole > 0);
        break;
      default:
        multiply.template operator()<3>(num_whole > 0);
        break;
    }
    device::wgmma_wait<1>();
    if (num_whole > 0) barriers.release(previous);
    previous = ring.slot;
    ring.advance();
  }
  barriers.end_turn();
  device::wgmma_wait<0>();
  device::pin_accumulators(acc);
  barriers.release(previous);
}

/// A CTA without rows still has to give the shared operand's stages back.
template <class Barriers, class Ring>
__device__ inline void skip_tile(const Barriers& barriers, Ring& ring, int num_k_blocks) {
  for (int k_block = 0; k_block < num_k_blocks; ++k_block) {
    barriers.await_filled(ring, k_block);
    __syncwarp();
    barriers.release(ring.slot);
    ring.advance();
  }
  barriers.end_turn();
}

/// Picks the wgmma width for the tile: one instantiation for each possible number of units, none
/// for the others.
template <OperandLayout kLayout, std::uint32_t kUnitsMask, KEnd kEnd = KEnd::whole, class Barriers,
          class Ring>
__device__ inline void multiply_units(int num_units, Accumulators& acc, std::uint32_t stages,
                                      int warpgroup, const Barriers& barriers, Ring& ring,
                                      int num_k_blocks, int last_k_steps = kKStepsPerBlock) {
  switch (num_units) {
#define MEGAMOE_UNITS(units)                                                   \
  case units:                                                                  \
    if constexpr ((kUnitsMask >> (units)&1U) != 0) {                           \
      multiply_tile<(units)*schedule::kRowsPerUnit, kEnd, kLayout>(            \
          acc, stages, warpgroup, barriers, ring, num_k_blocks, last_k_steps); \
    }                                                                          \
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
      break;
  }
}

}  // namespace megamoe::products
