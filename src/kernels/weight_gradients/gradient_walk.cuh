// The order of the weight gradients' tiles: expert by expert, its jobs one after the other. An
// expert's rows, a few tens of MB, stay in the L2 while all of its tiles read them. The number of
// tiles does not depend on the rows. Early jobs go through all experts before the others begin:
// those may still await their rows.
//
// bf16: lines fastest. fp32: channels fastest, so that clusters which run at the same time move
// whole lines of the gradient, and few pages of it: 8% of the backward pass at qwen3-235b where
// gradients are added, nothing as bf16 (docs/perf_log.md, section 21).
#pragma once

#include <cstdint>

#include "device/cluster.cuh"
#include "kernels/weight_gradients/weight_gradient.h"

namespace megamoe::products {

struct GradientTile {
  int job;
  int group;
  int channel_tile;  ///< in CTA tiles
  int first_block;   ///< along R
  int num_blocks;    ///< 0: nothing to do for this CTA but to share
  int first_row;     ///< of the expert, in the row buffers
  int num_k_blocks;
  int last_k_steps;
};

template <GradientShared kShared, GradientType kType>
class GradientWalk {
  using Cluster = GradientCluster<kShared>;

 public:
  __device__ GradientWalk(const WeightGradientParams& params, int cta_rank)
      : params_(params),
        cta_rank_(cta_rank),
        next_(static_cast<int>(blockIdx.x) / Cluster::kNumCtas) {
    for (int job = 0; job < params.num_jobs; ++job) {
      (job < params.num_early_jobs ? early_tiles_ : late_tiles_) += num_tiles(params.jobs[job]);
    }
  }

  __device__ bool next(GradientTile& tile) {
    const int num_groups = params_.rows.num_groups;
    while (next_ < (early_tiles_ + late_tiles_) * num_groups) {
      const bool is_early = next_ < early_tiles_ * num_groups;
      const int first = is_early ? 0 : early_tiles_ * num_groups;
      const int tiles_per_group = is_early ? early_tiles_ : late_tiles_;
      tile.group = (next_ - first) / tiles_per_group;
      int local = next_ - first - tile.group * tiles_per_group;
      next_ += static_cast<int>(gridDim.x) / Cluster::kNumCtas;
      const int num_rows = params_.rows.count[tile.group];
      // Adding nothing must leave the gradient as it was, bit by bit.
      if (num_rows == 0 && params_.update == GradientUpdate::add) continue;

      tile.job = is_early ? 0 : params_.num_early_jobs;
      while (local >= num_tiles(params_.jobs[tile.job]))
        local -= num_tiles(params_.jobs[tile.job++]);
      const GradientJob& job = params_.jobs[tile.job];
      const int line_tiles = num_line_tiles(job);
      const int walk_lines = line_tiles / Cluster::kLineTiles;
      const int walk_channels = num_tiles(job) / walk_lines;
      constexpr bool kLinesFirst = kType == GradientType::bf16;
      const int line = kLinesFirst ? local % walk_lines : local / walk_channels;
      const int channel = kLinesFirst ? local / walk_lines : local % walk_channels;
      const schedule::UnitRange blocks =
          schedule::unit_tile(job.num_line_blocks, line_tiles,
                              line * Cluster::kLineTiles + Cluster::line_tile(cta_rank_));
      tile.channel_tile = channel * Cluster::kChannelTiles + Cluster::channel_tile(cta_rank_);
      tile.first_block = blocks.first;
      tile.num_blocks = blocks.count;
      tile.first_row = params_.rows.begin[tile.group];
      tile.num_k_blocks = schedule::ceil_div(num_rows, kBlockK);
      tile.last_k_steps = schedule::num_row_units(num_rows - (tile.num_k_blocks - 1) * kBlockK);
      return true;
    }
    return false;
  }

 private:
  static __device__ int num_line_tiles(const GradientJob& job) {
    return schedule::num_unit_tiles(job.num_line_blocks, kMaxBlocksPerTile, Cluster::kLineTiles);
  }
  /// In cluster tiles.
  static __device__ int num_tiles(const GradientJob& job) {
    return num_line_tiles(job) / Cluster::kLineTiles *
           schedule::ceil_div(job.num_channel_tiles, Cluster::kChannelTiles);
  }

  const WeightGradientParams& params_;
  int cta_rank_;
  int next_;
  int early_tiles_ = 0;  ///< of an expert
  int late_tiles_ = 0;
};

}  // namespace megamoe::products
