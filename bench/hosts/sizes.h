// Two ways for hosts to know how much travels in a step, timed: exact, where ranks first tell each
// other their counts, and padded, where nobody asks and every message is as large as it can be.
#pragma once

#include <cstdint>
#include <vector>

#include "comm/cuda/host_link.h"
#include "megamoe/communicator.h"
#include "megamoe/config.h"

namespace megamoe::bench {

/// Milliseconds of the transfers of a forward and a backward call, one group of experts, without
/// packing and products: the slowest rank's medians, and the bytes that the busiest one sends.
struct StepTransfers {
  double ms = 0.0;
  std::int64_t bytes = 0;
};

struct SizesTimes {
  StepTransfers exact;    ///< counting and agreeing included
  double agree_ms = 0.0;  ///< of it, until every host knows all counts
  /// Every pair's messages hold what any routing can need.
  StepTransfers padded;
  /// They hold a quarter more than uniform routing needs on average; `fits` where this one did.
  StepTransfers padded_to_mean;
  bool fits = false;
};

/// Collective. `ids_RTK`: everybody's ids, [shape.max_tokens, K] each.
SizesTimes time_sizes(Communicator& group, cuda::HostLink& link, int device, const MoeShape& shape,
                      const std::vector<std::vector<std::int32_t>>& ids_RTK);

}  // namespace megamoe::bench
