// fp32 gradients: a piece is 128 channels of a quarter of the tile's lines, as four sub-tiles of 32
// channels (128 bytes a line).
#pragma once

#include "kernels/products/epilogue.cuh"
#include "kernels/weight_gradients/weight_gradient.h"

namespace megamoe::products {

/// This thread's first byte within a piece, per parity of the line it writes: element (channel 8h +
/// lane/4 of the warp's 16, line 2(lane%4) + i) of each 8-line block. The 32 lanes of one store hit
/// 32 banks: four lines x eight channels.
struct Fp32Lane {
  std::uint32_t line;      ///< 2 (lane % 4)
  std::uint32_t channel;   ///< within the 32 of its sub-tile, for h = 0
  std::uint32_t sub_tile;  ///< of the two of a block of 64 channels

  __device__ Fp32Lane() {
    const std::uint32_t lane = static_cast<std::uint32_t>(device::lane_idx());
    const std::uint32_t warp = threadIdx.x % device::kWarpgroupSize / device::kWarpSize;
    line = 2 * (lane % 4);
    channel = warp % 2 * 16 + lane / 4;
    sub_tile = warp / 2;
  }
  [[nodiscard]] __device__ std::uint32_t offset(int h, int i) const {
    const std::uint32_t at = channel + 8U * h;
    return device::swizzled_offset(line + i, at / 4) + at % 4 * 4;
  }
};

__device__ inline void store_word(std::uint32_t address, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}

__device__ inline float load_word(std::uint32_t address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
  return value;
}

/// A tile of `kBlocks` blocks of lines. Where gradients are added, the slots of the first pieces
/// hold what those are added to: each thread adds the words that it writes.
template <int kBlocks, class Writer>
__device__ inline void write_fp32_tile(const Accumulators& acc, int num_brought_in,
                                       Writer& writer) {
  constexpr int kEights = kBlocks * kFp32LinesABlock / 8;  ///< eights of lines in a piece
  constexpr std::uint32_t kSubTileBytes = kEights * device::kSwizzleAtomBytes;
  const Fp32Lane lane;
  const std::uint32_t offsets[4] = {lane.offset(0, 0), lane.offset(0, 1), lane.offset(1, 0),
                                    lane.offset(1, 1)};
#pragma unroll
  for (int piece = 0; piece < kNumGradientPieces<GradientType::fp32>; ++piece) {
    const bool adds = piece < num_brought_in;
    const std::uint32_t slot = writer.begin_slot(piece) + lane.sub_tile * kSubTileBytes;
#pragma unroll
    for (int eight = 0; eight < kEights; ++eight) {
#pragma unroll
      for (int block = 0; block < kBlocksPerWarpgroup; ++block) {
        const std::uint32_t address =
            slot + 2 * block * kSubTileBytes + eight * device::kSwizzleAtomBytes;
#pragma unroll
        for (int part = 0; part < 4; ++part) {
          const std::uint32_t word = address + offsets[part];
          // -0 changes no value, nor a sign. A branch around the addition would define
          // accumulators, for which the compiler serialises the products (ptxas C7515).
          const float before = adds ? load_word(word) : -0.0F;
          store_word(word, acc[block][(piece * kEights + eight) * 4 + part] + before);
        }
      }
    }
    writer.end(piece);
  }
}

/// The index of an accumulator must be a compile-time constant, so each width has code of its own.
template <class Writer>
__device__ inline void write_fp32_blocks(const Accumulators& acc, int num_blocks,
                                         int num_brought_in, Writer& writer) {
  static_assert(kMaxBlocksPerTile == 3);
  switch (num_blocks) {
    case 1:
      write_fp32_tile<1>(acc, num_brought_in, writer);
      break;
    case 2:
      write_fp32_tile<2>(acc, num_brought_in, writer);
      break;
    default:
      write_fp32_tile<3>(acc, num_brought_in, writer);
      break;
  }
}

/// The gradient of an expert without rows. Without accumulators: defined by anything but products,
/// they would make the compiler serialise those (ptxas C7515).
template <class Writer>
__device__ inline void write_fp32_zeros(int num_blocks, Writer& writer) {
  const int piece_bytes =
      num_blocks * kFp32LinesABlock * kGradientTileChannels<GradientType::fp32> * 4;
  const int first = static_cast<int>(threadIdx.x) % device::kWarpgroupSize * 4;
  for (int piece = 0; piece < kNumGradientPieces<GradientType::fp32>; ++piece) {
    const std::uint32_t slot = writer.begin_slot(piece);
    for (int byte = first; byte < piece_bytes; byte += device::kWarpgroupSize * 4) {
      store_word(slot + byte, 0.0F);
    }
    writer.end(piece);
  }
}

}  // namespace megamoe::products
