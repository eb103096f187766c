// The weight gradients: which products they are, and what their kernel is given.
//
// A job is d[e, R, C] = sum over an expert's rows of r[row, R]^T c[row, C]: K is the expert's rows,
// in order.
//   d_down[e, H, I]: r = dy, c = w a        d_gate[e, I, H]: r = dg, c = x        d_up[e, I, H]: r
//   = du, c = x
// C, the contiguous side of the gradient, takes the 256 side of the tile ("channels"); R takes the
// 192 side in blocks of 64. Both operands must be zero from an expert's last row to the next
// multiple of 16.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "kernels/products/row_product.h"

namespace megamoe::products {

inline constexpr int kMaxGradientJobs = 3;
inline constexpr int kGradientBlock = 64;
inline constexpr int kMaxBlocksPerTile = kTileRows / kGradientBlock;
inline constexpr int kUnitsPerGradientBlock = kGradientBlock / schedule::kRowsPerUnit;

/// What a gradient is stored as; `fp32` is also what gradients are added into.
enum class GradientType { bf16, fp32 };

/// Channels of a CTA's tile. bf16: both warpgroups work on one tile, 128 channels each. fp32: each
/// has tiles of its own, in turns (turns.h).
template <GradientType kType>
inline constexpr int kGradientTileChannels =
    kType == GradientType::bf16 ? kTileChannels : kTileChannels / kNumMathWarpgroups;
template <GradientType kType>
inline constexpr std::uint32_t kGradientChannelBytes = kGradientTileChannels<kType>* kBlockK * 2;

/// Pieces that one warpgroup passes to the store warps at a tile's end: as bf16 64 channels of all
/// lines; as fp32 all 128 channels of a quarter of the lines, so that 512 bytes of a line move
/// together.
template <GradientType kType>
inline constexpr int kNumGradientPieces = kType == GradientType::bf16 ? kBlocksPerWarpgroup : 4;
inline constexpr int kFp32LinesABlock = kGradientBlock / kNumGradientPieces<GradientType::fp32>;

template <GradientType kType>
using GradientPieces = PieceNumbering<kNumGradientPieces<kType>>;

struct GradientJob {
  CUtensorMap channels;                     ///< c, four blocks of 64
  CUtensorMap lines[kMaxBlocksPerTile];     ///< r, by blocks
  CUtensorMap gradient[kMaxBlocksPerTile];  ///< d, by blocks
  std::int32_t num_channel_tiles;           ///< along C, in CTA tiles
  std::int32_t num_line_blocks;             ///< along R, in blocks of 64
};

enum class GradientUpdate : std::int32_t { store, add };

/// Where fp32 gradients are added, what the first pieces of a tile are added to is brought into
/// their slots before, and the sums are stored; the other pieces the copy engine adds into memory.
/// Each way alone is slower at qwen3-235b: the copy engine adds 0.9 TB/s, and two slots bring in
/// and store hardly more. One to four pieces are within 1% at qwen3-235b and qwen3-30b, and two are
/// the best at deepseek-v3 (docs/perf_log.md, section 24).
inline constexpr int kPiecesBroughtIn = 2;

/// A list of experts.
struct GradientGroups {
  std::int32_t num_groups;
  std::uint16_t groups[kMaxGroups];
};

struct WeightGradientParams {
  GradientJob jobs[kMaxGradientJobs];
  std::int32_t num_jobs;
  std::int32_t num_early_jobs;  ///< of all experts before the other jobs; may be 0
  GradientUpdate update;
  /// Null: clusters take tiles in turn. Else device memory, 0 before the launch: they take them
  /// from it.
  std::uint32_t* num_tiles_taken;
  const std::uint32_t* cancelled;  ///< null, or a word that is not 0 where nothing may be written
  GroupedRowsArgs rows;
  device::ProductEnds* ends;  ///< or null
  trace::Region trace_region;
};

}  // namespace megamoe::products
