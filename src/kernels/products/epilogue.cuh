// What the math warpgroups do with a finished tile: round to bf16 at the named points, and leave
// row-major pieces in the slots.
#pragma once

#include "device/barrier.cuh"
#include "device/cluster.cuh"
#include "device/matrix_store.cuh"
#include "device/trace.cuh"
#include "kernels/products/grouped_walk.cuh"
#include "kernels/products/operand_layout.cuh"
#include "kernels/products/pieces.h"

namespace megamoe::products {

/// Whether slots are granted from the start, or each only once it has been filled with what the
/// piece is to be added to.
enum class FirstGrant { given, awaited };

/// Writes 64-channel pieces into the slots, in the order in which the store warps expect them.
template <class Pieces>
class PieceWriter {
 public:
  template <class Storage>
  __device__ PieceWriter(Storage& shared, int warpgroup, trace::Recorder& recorder,
                         FirstGrant grant = FirstGrant::given)
      : slots_(device::shared_address(shared.slots)),
        filled_(device::shared_address(shared.barriers.slot_filled)),
        granted_(device::shared_address(shared.barriers.slot_granted[warpgroup])),
        warpgroup_(warpgroup),
        recorder_(recorder) {
    // Lane l addresses line l % 8 of block l / 8; blocks 1 and 3 are channels 8..15 of the warp,
    // blocks 2 and 3 rows 8..15.
    const int lane = device::lane_idx();
    const int warp = static_cast<int>(threadIdx.x) % device::kWarpgroupSize / device::kWarpSize;
    const std::uint32_t row = static_cast<std::uint32_t>((lane & 7) + ((lane & 16) != 0 ? 8 : 0));
    lane_offset_ =
        device::swizzled_offset(row, static_cast<std::uint32_t>(warp * 2 + ((lane >> 3) & 1)));
    // The first writer of a slot that needs no grant waits for the phase before the first, which
    // counts as completed.
    if (grant == FirstGrant::awaited) return;
    for (int slot = 0; slot < Pieces::kNumSlots; ++slot) {
      if (Pieces::warpgroup_of(slot) == warpgroup) parities_ |= 1U << slot;
    }
  }

  /// Waits until the slot of the warpgroup's piece `piece` may be overwritten; returns its address.
  __device__ std::uint32_t begin_slot(int piece) {
    const std::uint32_t slot = slot_of(piece);
    recorder_.wait(granted_ + slot * 8U, parities_ >> slot & 1U);
    parities_ ^= 1U << slot;
    return slots_ + slot * Pieces::kSlotBytes;
  }
  /// The same, with this lane's offset in the matrix stores of unit 0.
  __device__ std::uint32_t begin(int piece) { return begin_slot(piece) + lane_offset_; }

  /// Passes all pieces of a tile on as they are.
  __device__ void write_nothing() {
    for (int piece = 0; piece < Pieces::kPerWarpgroup; ++piece) {
      begin_slot(piece);
      end(piece);
    }
  }

  __device__ void end(int piece) {
    device::fence_async_shared();
    __syncwarp();
    if (device::lane_idx() == 0) device::arrive(filled_ + slot_of(piece) * 8U);
  }

 private:
  [[nodiscard]] __device__ std::uint32_t slot_of(int piece) const {
    return static_cast<std::uint32_t>(Pieces::number_of(warpgroup_, piece)) % Pieces::kNumSlots;
  }

  std::uint32_t slots_;
  std::uint32_t filled_;
  std::uint32_t granted_;
  int warpgroup_;
  trace::Recorder& recorder_;
  std::uint32_t parities_ = 0;
  std::uint32_t lane_offset_;
};

/// down, dx: each block of 64 channels is a piece.
template <class Writer>
__device__ inline void write_blocks(const Accumulators& acc, int num_units, Writer& writer) {
#pragma unroll
  for (int block = 0; block < kBlocksPerWarpgroup; ++block) {
    const std::uint32_t address = writer.begin(block);
#pragma unroll
    for (int unit = 0; unit < schedule::kMaxUnitsPerTile; ++unit) {
      if (unit >= num_units) break;
      const float* d = &acc[block][unit * 8];
      device::store_blocks_transposed(address + unit * kUnitBytes, device::pack_bf16(d[0], d[1]),
                                      device::pack_bf16(d[2], d[3]), device::pack_bf16(d[4], d[5]),
                                      device::pack_bf16(d[6], d[7]));
    }
    writer.end(block);
  }
}

/// gate_up: block 0 is gate, block 1 is up of the same channels; a = bf16(act(g) * u) from the
/// rounded g and u.
template <bool kSave, class Activation, class Writer>
__device__ inline void write_activation(const Accumulators& acc, int num_units,
                                        const Activation& activation, Writer& writer) {
  if constexpr (kSave) {
#pragma unroll
    for (int block = 0; block < kBlocksPerWarpgroup; ++block) {
      const std::uint32_t address = writer.begin(block);
#pragma unroll
      for (int unit = 0; unit < schedule::kMaxUnitsPerTile; ++unit) {
        if (unit >= num_units) break;
        const float* d = &acc[block][unit * 8];
        device::store_blocks_transposed(address + unit * kUnitBytes, device::pack_bf16(d[0], d[1]),
                                        device::pack_bf16(d[2], d[3]),
                                        device::pack_bf16(d[4], d[5]),
                                        device::pack_bf16(d[6], d[7]));
      }
      writer.end(block);
    }
  }
  constexpr int kPiece = kSave ? kBlocksPerWarpgroup : 0;
  const std::uint32_t address = writer.begin(kPiece);
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
  writer.end(kPiece);
}

/// up without a gate: a = bf16(act(u)) from the rounded u, block by block.
template <bool kSave, class Activation, class Writer>
__device__ inline void write_ungated(const Accumulators& acc, int num_units,
                                     const Activation& activation, Writer& writer) {
  if constexpr (kSave) write_blocks(acc, num_units, writer);
#pragma unroll
  for (int block = 0; block < kBlocksPerWarpgroup; ++block) {
    const int piece = (kSave ? kBlocksPerWarpgroup : 0) + block;
    const std::uint32_t address = writer.begin(piece);
#pragma unroll
    for (int unit = 0; unit < schedule::kMaxUnitsPerTile; ++unit) {
      if (unit >= num_units) break;
      std::uint32_t packed[4];
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        const float* d = &acc[block][unit * 8 + pair * 2];
        const std::uint32_t up = device::pack_bf16(d[0], d[1]);
        packed[pair] = device::pack_bf16(activation.value(0.0F, device::first_of(up)),
                                         activation.value(0.0F, device::second_of(up)));
      }
      device::store_blocks_transposed(address + unit * kUnitBytes, packed[0], packed[1], packed[2],
                                      packed[3]);
    }
    writer.end(piece);
  }
}

}  // namespace megamoe::products
