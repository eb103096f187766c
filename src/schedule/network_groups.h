// Into how many groups of experts a call over several hosts is cut: a cost model.
//
// While groups overlap, what a call cannot hide is the first group's tokens and the last one's
// results (expert_groups.h: these groups are half as large as others); more groups make them
// shorter, and each costs its launches and messages. Where products take longer than transfers that
// holds as well, for what is exposed is the same.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace megamoe::schedule {

/// What a rank sends, and receives, in a forward call under uniform routing.
struct NetworkLoad {
  int num_hosts = 1;
  std::int64_t num_tokens = 0;  ///< of the rank
  std::int32_t top_k = 1;
  std::int32_t experts_per_rank = 1;
  std::int64_t row_bytes = 0;
  double bytes_per_s = 0.0;  ///< each way
};

/// Two transfers with packing and unpacking, two meetings on the host, and the starts and ends of a
/// group's kernels.
inline constexpr double kGroupCostS = 200e-6;

/// Seconds of a forward call with `num_groups`, at most as many as a rank has experts, that nothing
/// hides.
inline double exposed_s(const NetworkLoad& load, int num_groups) {
  const double others = load.num_hosts - 1;
  const auto tokens = static_cast<double>(load.num_tokens);
  // Of the first group's experts, and of the last one's, among those of all hosts.
  const double half_a_group = num_groups == 1 ? 1.0 : 0.5 / (num_groups - 1);
  const double share = std::max(half_a_group, 1.0 / load.experts_per_rank) / load.num_hosts;
  // A token needs a host, and there the first group, unless all of its slots are elsewhere.
  const double needs_first = 1.0 - std::pow(1.0 - share, load.top_k);
  const double first_rows = tokens * others * needs_first;
  const double last_results = tokens * load.top_k * others * share;
  return (first_rows + last_results) * static_cast<double>(load.row_bytes) / load.bytes_per_s +
         num_groups * kGroupCostS;
}

/// From 1 to `most`, which is at most the number of a rank's experts; 1 where the bandwidth is not
/// known.
inline int choose_num_groups(const NetworkLoad& load, int most) {
  int best = 1;
  if (load.bytes_per_s <= 0.0) return best;
  for (int groups = 2; groups <= most; ++groups) {
    if (exposed_s(load, groups) < exposed_s(load, best)) best = groups;
  }
  return best;
}

}  // namespace megamoe::schedule
