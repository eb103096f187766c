// Which role waits for what: a timeline's time as shares.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "trace/timeline.h"

namespace megamoe::timeline {

/// A state and its share of the kernel's time, mean over SMs.
using Share = std::pair<std::string, double>;

struct RoleShares {
  std::string role;
  std::vector<Share> states;  ///< they add up to 1
};

/// One kernel on one GPU. Shares are of the time from the first CTA's beginning to the last one's
/// end, mean over SMs.
struct KernelSummary {
  std::string name;
  int rank = 0;
  int num_sms = 0;
  double ms = 0.0;
  double clock_ghz = 0.0;
  /// Some warpgroup is in a main loop, past the wait for its first operands.
  double main_loops = 0.0;
  /// What the products would take at the tensor cores' full rate at this clock; within main_loops.
  double at_full_rate = 0.0;
  // While no warpgroup is; these and main_loops add up to 1.
  double start = 0.0;            ///< before the SM's first main loop
  double awaits_rows = 0.0;      ///< the load warp waits for rows of the next tile
  double epilogue = 0.0;         ///< a warpgroup is in its epilogue
  double awaits_operands = 0.0;  ///< the rest: the first operands of a tile are on their way
  double rows_beside = 0.0;      ///< after the SM's last result: rows are still pulled or summed
  double tail = 0.0;             ///< the rest after the SM's last result
  std::vector<RoleShares> roles;
  std::int64_t num_lost = 0;  ///< spans that were not kept: the shares are wrong if there are any
};

KernelSummary summarize(const KernelRun& kernel, int rank);

/// Of the time in which other ranks' dx rows are pushed, the share that lies under this rank's
/// weight gradients; 0 where nobody else pushes.
double share_under_weight_gradients(const std::vector<GpuTimeline>& gpus, int rank);

/// For people, one kernel after the other.
std::string to_table(const std::vector<KernelSummary>& summaries);
nlohmann::ordered_json to_json(const std::vector<KernelSummary>& summaries);

}  // namespace megamoe::timeline
