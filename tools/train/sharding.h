// How the global batch is divided, and sums over the ranks that do not depend on their number.
//
// The batch is cut into kNumShards shards, whatever the number of ranks, and a rank takes a run of
// whole shards. What is summed over tokens (shared gradients, the loss) is summed within each shard
// and then over the shards in their order: a run's numbers are the same bits on 1, 2 or 8 ranks.
// Summing over each rank's tokens and then over the ranks would be shorter, but rounding then
// depends on the number of ranks, and training amplifies it: losses at 1 and 2 ranks were 5e-3
// apart after 20 steps, and 0.1 after 200.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "megamoe/communicator.h"

namespace megamoe::trainer {

/// How long a rank waits for the others; one of them may be writing a checkpoint.
inline constexpr double kDeadlineS = 600.0;

/// More ranks than shards work, but some of them then have no tokens, only experts.
inline constexpr int kNumShards = 8;

/// Items [first, first + count).
struct Share {
  std::int64_t first = 0;
  std::int64_t count = 0;
};
/// Where part `index` of `count` items begins, cut into parts whose sizes differ by one at most; a
/// single item is in the first part.
constexpr std::int64_t part_begin(std::int64_t count, std::int64_t index, std::int64_t num_parts) {
  return (count * index + num_parts - 1) / num_parts;
}
constexpr Share share_of(std::int64_t count, std::int64_t index, std::int64_t num_parts) {
  const std::int64_t first = part_begin(count, index, num_parts);
  return {first, part_begin(count, index + 1, num_parts) - first};
}

/// The shards of a rank.
constexpr Share shards_of_rank(int rank, int num_ranks) {
  return share_of(kNumShards, rank, num_ranks);
}
/// The items of a rank: those of its shards.
constexpr Share items_of_rank(std::int64_t count, int rank, int num_ranks) {
  const Share shards = shards_of_rank(rank, num_ranks);
  const std::int64_t first = part_begin(count, shards.first, kNumShards);
  return {first, part_begin(count, shards.first + shards.count, kNumShards) - first};
}
/// Where a rank's shard number `index` lies among the rank's items.
constexpr Share local_shard(std::int64_t count, int rank, int num_ranks, std::int64_t index) {
  const Share shards = shards_of_rank(rank, num_ranks);
  const Share shard = share_of(count, shards.first + index, kNumShards);
  return {shard.first - items_of_rank(count, rank, num_ranks).first, shard.count};
}
/// The largest number of items of any rank.
constexpr std::int64_t max_items_of_rank(std::int64_t count, int num_ranks) {
  std::int64_t most = 0;
  for (int rank = 0; rank < num_ranks; ++rank) {
    most = std::max(most, items_of_rank(count, rank, num_ranks).count);
  }
  return most;
}

/// Tokens of shards that follow one another from token 0.
inline std::int64_t num_tokens_of(std::span<const Share> shards) {
  return shards.empty() ? 0 : shards.back().first + shards.back().count;
}

/// Sums a few fp64 numbers over the ranks, in rank order: the same bits on every rank. `scratch` is
/// kept by the caller so that a step allocates nothing.
inline void sum_over_ranks(Communicator& communicator, std::span<double> values,
                           std::vector<double>& scratch, const char* what) {
  scratch.resize(values.size() * static_cast<std::size_t>(communicator.size()));
  communicator.all_gather(values.data(), scratch.data(), values.size_bytes(), what, kDeadlineS);
  std::ranges::fill(values, 0.0);
  for (std::size_t i = 0; i < scratch.size(); ++i) values[i % values.size()] += scratch[i];
}

}  // namespace megamoe::trainer
