// What the math warpgroups do with a finished tile: round to bf16 at the named points, and leave
// row-major pieces in the slots.
#pragma once

#include "device/barrier.cuh"
#include "device/cluster.cuh"
#include "device/matrix_store.cuh"
#include "kernels/products/grouped_walk.cuh"
#include "kernels/products/operand_layout.cuh"

namespace megamoe::products {

/// Writes 64-channel pieces into the slots, in the order in which the store warps expect them.
class PieceWriter {
 public:
  __device__ PieceWriter(SharedStorage& shared, int warpgroup, int pieces_per_warpgroup)
      : slots_(device::shared_address(shared.slots)),
        filled_(device::shared_address(shared.barriers.slot_filled)),
        free_(device::shared_address(shared.barriers.slot_free)),
        next_piece_(warpgroup * pieces_per_warpgroup),
        other_pieces_((kNumMathWarpgroups - 1) * pieces_per_warpgroup) {
    // Lane l addresses line l % 8 of block l / 8; blocks 1 and 3 are channels 8..15 of the warp,
    // blocks 2 and 3 rows 8..15.
    const int lane = device::lane_idx();
    const int warp = static_cast<int>(threadIdx.x) % device::kWarpgroupSize / device::kWarpSize;
    const std::uint32_t row = static_cast<std::uint32_t>((lane & 7) + ((lane & 16) != 0 ? 8 : 0));
    lane_offset_ =
        device::swizzled_offset(row, static_cast<std::uint32_t>(warp * 2 + ((lane >> 3) & 1)));
  }

  /// Waits until the next piece's slot may be overwritten; returns this lane's address for unit 0.
  __device__ std::uint32_t begin() {
    const std::uint32_t slot = next_piece_ % kNumSlots;
    device::wait(free_ + slot * 8U, ((next_piece_ / kNumSlots) & 1U) ^ 1U);
    return slots_ + slot * kSlotBytes + lane_offset_;
  }

  __device__ void end() {
    const std::uint32_t slot = next_piece_ % kNumSlots;
    device::fence_async_shared();
    __syncwarp();
    if (device::lane_idx() == 0) device::arrive(filled_ + slot * 8U);
    ++next_piece_;
  }

  /// After a warpgroup's last piece of a tile: the other warpgroup's pieces come before its next
  /// one.
  __device__ void end_tile() { next_piece_ += other_pieces_; }

 private:
  std::uint32_t slots_;
  std::uint32_t filled_;
  std::uint32_t free_;
  std::uint32_t next_piece_;
  std::uint32_t other_pieces_;
  std::uint32_t lane_offset_;
};

/// down, dx: each block of 64 channels is a piece.
__device__ inline void write_blocks(const Accumulators& acc, int num_units, PieceWriter& writer) {
#pragma unroll
  for (int block = 0; block < kBlocksPerWarpgroup; ++block) {
    const std::uint32_t address = writer.begin();
#pragma unroll
    for (int unit = 0; unit < schedule::kMaxUnitsPerTile; ++unit) {
      if (unit >= num_units) break;
      const float* d = &acc[block][unit * 8];
      device::store_blocks_transposed(address + unit * kUnitBytes, device::pack_bf16(d[0], d[1]),
                                      device::pack_bf16(d[2], d[3]), device::pack_bf16(d[4], d[5]),
                                      device::pack_bf16(d[6], d[7]));
    }
    writer.end();
  }
  writer.end_tile();
}

/// gate_up: block 0 is gate, block 1 is up of the same channels; a = bf16(act(g) * u) from the
/// rounded g and u.
template <class Activation, bool kSave>
__device__ inline void write_activation(const Accumulators& acc, int num_units,
                                        const Activation& activation, PieceWriter& writer) {
  if constexpr (kSave) {
#pragma unroll
    for (int block = 0; block < kBlocksPerWarpgroup; ++block) {
      const std::uint32_t address = writer.begin();
#pragma unroll
      for (int unit = 0; unit < schedule::kMaxUnitsPerTile; ++unit) {
        if (unit >= num_units) break;
        const float* d = &acc[block][unit * 8];
        device::store_blocks_transposed(address + unit * kUnitBytes, device::pack_bf16(d[0], d[1]),
                                        device::pack_bf16(d[2], d[3]),
                                        device::pack_bf16(d[4], d[5]),
                                        device::pack_bf16(d[6], d[7]));
      }
      writer.end();
    }
  }
  const std::uint32_t address = writer.begin();
#pragma unroll
  for (int unit = 0; unit < schedule::kMaxUnitsPerTile; ++unit) {
    if (unit >= num_units) break;
    std::uint32_t packed[4];
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      const int i = unit * 8 + pair * 2;
      const std::uint32_t gate = device::pack_bf16(acc[0][i], acc[0][i + 1]);
      const std::uint32_t up = device::pack_bf16(acc[1][i], acc[1][i + 1]);
      packed[pair] =
          device::pack_bf16(activation.value(device::first_of(gate), device::first_of(up)),
                            activation.value(device::second_of(gate), device::second_of(up)));
    }
    device::store_blocks_transposed(address + unit * kUnitBytes, packed[0], packed[1], packed[2],
                                    packed[3]);
  }
  writer.end();
  writer.end_tile();
}

}  // namespace megamoe::products
