// The order of the weight gradients' tiles: expert by expert, its jobs one after the other. An
// expert's rows, a few tens of MB, stay in the L2 while all of its tiles read them. How many tiles
// an expert has does not depend on its rows, but that it has any
// (kernels/weight_gradients/gradient_groups.cuh). Early jobs go through all experts before the
// others begin: those may still await their rows.
//
// bf16: lines fastest. fp32: channels fastest, so that clusters which run at the same time move
// whole lines of the gradient, and few pages of it: 8% of the backward pass at qwen3-235b where
// gradients are added, nothing as bf16 (docs/perf_log.md, section 21).
//
// Shared by the kernels and the CPU tests.
#pragma once

#include <cstdint>

#include "schedule/tile_walk.h"

namespace megamoe::schedule {

inline constexpr int kMaxLineBlocks = 3;   ///< of a CTA's tile
inline constexpr int kRowsPerKBlock = 64;  ///< of the expert's rows, along which is summed

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

/// `Params` has the jobs (num_jobs, of which num_early_jobs are early; of each job
/// num_channel_tiles along C, in CTA tiles, and num_line_blocks along R, in blocks of 64) and the
/// experts' rows; `Groups` the experts that have tiles. `Tickets` says which tiles are the
/// cluster's, as those of GroupedWalk.
template <Shared kShared, bool kLinesFirst, class Params, class Groups, class Tickets>
class GradientWalk {
 public:
  MEGAMOE_HOST_DEVICE GradientWalk(const Params& params, const Groups& groups, int cta_rank,
                                   Tickets tickets)
      : params_(params), groups_(groups), cta_rank_(cta_rank), tickets_(tickets) {
    for (int job = 0; job < params.num_jobs; ++job) {
      (job < params.num_early_jobs ? early_tiles_ : late_tiles_) += num_tiles(params.jobs[job]);
    }
  }

  MEGAMOE_HOST_DEVICE bool next(GradientTile& tile) {
    const int number = static_cast<int>(tickets_.read());
    const int num_early = early_tiles_ * groups_.num_groups;
    if (number >= num_early + late_tiles_ * groups_.num_groups) return false;
    tickets_.hand_back();
    const bool is_early = number < num_early;
    const int tiles_per_group = is_early ? early_tiles_ : late_tiles_;
    const int place = (is_early ? number : number - num_early) / tiles_per_group;
    int local = (is_early ? number : number - num_early) - place * tiles_per_group;
    tile.group = groups_.groups[place];
    const int num_rows = params_.rows.count[tile.group];
    tile.job = is_early ? 0 : params_.num_early_jobs;
    while (local >= num_tiles(params_.jobs[tile.job])) local -= num_tiles(params_.jobs[tile.job++]);
    const auto& job = params_.jobs[tile.job];
    const int line_tiles = num_line_tiles(job);
    const int walk_lines = kShared == Shared::rows ? line_tiles : line_tiles / kClusterSize;
    const int walk_channels = num_tiles(job) / walk_lines;
    const int line = kLinesFirst ? local % walk_lines : local / walk_channels;
    const int channel = kLinesFirst ? local / walk_lines : local % walk_channels;
    const UnitRange blocks = unit_tile(job.num_line_blocks, line_tiles,
                                       kShared == Shared::rows ? line : line * 2 + cta_rank_);
    tile.channel_tile = kShared == Shared::rows ? channel * 2 + cta_rank_ : channel;
    tile.first_block = blocks.first;
    tile.num_blocks = blocks.count;
    tile.first_row = params_.rows.begin[tile.group];
    tile.num_k_blocks = ceil_div(num_rows, kRowsPerKBlock);
    tile.last_k_steps = num_row_units(num_rows - (tile.num_k_blocks - 1) * kRowsPerKBlock);
    return true;
  }

 private:
  template <class Job>
  static MEGAMOE_HOST_DEVICE int num_line_tiles(const Job& job) {
    return num_unit_tiles(job.num_line_blocks, kMaxLineBlocks,
                          kShared == Shared::channels ? kClusterSize : 1);
  }
  /// In cluster tiles.
  template <class Job>
  static MEGAMOE_HOST_DEVICE int num_tiles(const Job& job) {
    return kShared == Shared::rows
               ? num_line_tiles(job) * ceil_div(job.num_channel_tiles, kClusterSize)
               : num_line_tiles(job) / kClusterSize * job.num_channel_tiles;
  }

  const Params& params_;
  const Groups& groups_;
  int cta_rank_;
  Tickets tickets_;
  int early_tiles_ = 0;  ///< of an expert
  int late_tiles_ = 0;
};

}  // namespace megamoe::schedule
