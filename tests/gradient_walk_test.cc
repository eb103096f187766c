// The walk over the weight gradients' tiles: what the clusters of a launch compute together.
#include "schedule/gradient_walk.h"

#include <gtest/gtest.h>

#include <map>
#include <tuple>
#include <vector>

namespace megamoe::schedule {
namespace {

struct Job {
  int num_channel_tiles;
  int num_line_blocks;
};
struct Params {
  std::vector<Job> jobs;
  int num_jobs;
  int num_early_jobs;
  struct {
    std::vector<int> begin;
    std::vector<int> count;
  } rows;
};
struct Groups {
  int num_groups;
  std::vector<int> groups;
};
struct Grid {
  int number;
  int count;
  [[nodiscard]] int cluster() const { return number; }
  [[nodiscard]] int num_clusters() const { return count; }
};

/// Experts 0 and 3 have no rows; 3 is left out, as where gradients are added.
Params params_of(const std::vector<Job>& jobs, int num_early_jobs) {
  return {jobs,
          static_cast<int>(jobs.size()),
          num_early_jobs,
          {{0, 0, 64, 320, 320}, {0, 64, 200, 0, 1}}};
}
Groups listed() { return {4, {0, 1, 2, 4}}; }

/// The tiles of both CTAs of all clusters, in the order of each CTA.
template <Shared kShared, bool kLinesFirst>
std::vector<std::vector<GradientTile>> walk(const Params& params, int num_clusters) {
  std::vector<std::vector<GradientTile>> ctas;
  const Groups groups = listed();
  for (int cluster = 0; cluster < num_clusters; ++cluster) {
    for (int rank = 0; rank < kClusterSize; ++rank) {
      const EveryNth<Grid> tickets(Grid{cluster, num_clusters});
      GradientWalk<kShared, kLinesFirst, Params, Groups, EveryNth<Grid>> tiles(params, groups, rank,
                                                                               tickets);
      GradientTile tile;
      ctas.emplace_back();
      while (tiles.next(tile)) ctas.back().push_back(tile);
    }
  }
  return ctas;
}

template <Shared kShared, bool kLinesFirst>
void expect_each_block_once(const Params& params, int num_clusters) {
  std::map<std::tuple<int, int, int, int>, int> times;  // expert, job, channel tile, line block
  for (const auto& tiles : walk<kShared, kLinesFirst>(params, num_clusters)) {
    for (const GradientTile& tile : tiles) {
      ASSERT_LE(tile.num_blocks, kMaxLineBlocks);
      // An odd last tile's partner, which computes nothing that is stored.
      if (tile.channel_tile >= params.jobs[tile.job].num_channel_tiles) continue;
      for (int block = 0; block < tile.num_blocks; ++block) {
        ++times[{tile.group, tile.job, tile.channel_tile, tile.first_block + block}];
      }
    }
  }
  int num_blocks = 0;
  for (const Job& job : params.jobs) num_blocks += job.num_channel_tiles * job.num_line_blocks;
  EXPECT_EQ(times.size(), static_cast<std::size_t>(num_blocks * listed().num_groups));
  for (const auto& [block, count] : times) EXPECT_EQ(count, 1);
}

TEST(GradientWalk, ClustersTogetherComputeEveryBlockOnce) {
  for (const std::vector<Job>& jobs :
       {std::vector<Job>{{1, 1}}, {{3, 7}, {2, 12}, {2, 12}}, {{16, 5}, {1, 48}}}) {
    for (int num_early = 0; num_early <= static_cast<int>(jobs.size()); ++num_early) {
      for (const int num_clusters : {1, 3, 66}) {
        const Params params = params_of(jobs, num_early);
        expect_each_block_once<Shared::rows, true>(params, num_clusters);
        expect_each_block_once<Shared::rows, false>(params, num_clusters);
        expect_each_block_once<Shared::channels, true>(params, num_clusters);
        expect_each_block_once<Shared::channels, false>(params, num_clusters);
      }
    }
  }
}

TEST(GradientWalk, EarlyJobsOfAllExpertsComeBeforeTheOthers) {
  const auto ctas = walk<Shared::rows, false>(params_of({{2, 3}, {2, 3}, {2, 3}}, 1), 1);
  int last_group = 0;
  bool is_late = false;
  for (const GradientTile& tile : ctas[0]) {
    if (tile.job > 0 && !is_late) {
      is_late = true;
      last_group = 0;
    }
    EXPECT_EQ(tile.job > 0, is_late);
    EXPECT_GE(tile.group, last_group);
    last_group = tile.group;
  }
  EXPECT_TRUE(is_late);
}

/// Rows are summed in blocks of 64, the last of which ends with the last 16 that hold a row.
TEST(GradientWalk, ATileSumsItsExpertsRows) {
  const auto ctas = walk<Shared::channels, true>(params_of({{1, 6}}, 0), 1);
  std::map<int, std::tuple<int, int, int>> of_group;
  for (const GradientTile& tile : ctas[1]) {
    of_group[tile.group] = {tile.first_row, tile.num_k_blocks, tile.last_k_steps};
  }
  EXPECT_EQ(of_group[1], std::make_tuple(0, 1, 4));
  EXPECT_EQ(of_group[2], std::make_tuple(64, 4, 1));
  EXPECT_EQ(of_group[4], std::make_tuple(320, 1, 1));
  EXPECT_EQ(std::get<1>(of_group[0]), 0);
  EXPECT_EQ(of_group.count(3), 0U);
}

}  // namespace
}  // namespace megamoe::schedule
