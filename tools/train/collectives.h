// What the trainer asks of a communicator beside what the layer does.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "megamoe/communicator.h"

namespace megamoe::trainer {

/// How long a rank waits for the others; one of them may be writing a checkpoint.
inline constexpr double kDeadlineS = 600.0;

/// Sums a few fp64 numbers over the ranks, in rank order: the same bits on every rank. `scratch` is
/// kept by the caller so that a step allocates nothing.
inline void sum_over_ranks(Communicator& communicator, std::span<double> values,
                           std::vector<double>& scratch, const char* what) {
  scratch.resize(values.size() * static_cast<std::size_t>(communicator.size()));
  communicator.all_gather(values.data(), scratch.data(), values.size_bytes(), what, kDeadlineS);
  std::ranges::fill(values, 0.0);
  for (std::size_t i = 0; i < scratch.size(); ++i) values[i % values.size()] += scratch[i];
}

/// A rank's share of items [0, count): contiguous, and no two shares differ by more than one.
struct Share {
  std::int64_t first;
  std::int64_t count;
};
constexpr Share share_of(std::int64_t count, int rank, int num_ranks) {
  const std::int64_t first = count * rank / num_ranks;
  return {first, count * (rank + 1) / num_ranks - first};
}
/// The largest share of any rank.
constexpr std::int64_t largest_share(std::int64_t count, int num_ranks) {
  return (count + num_ranks - 1) / num_ranks;
}

}  // namespace megamoe::trainer
