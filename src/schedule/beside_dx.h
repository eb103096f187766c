// The first weight gradients beside dx, where gradients are added into fp32: adding is bound by
// memory, dx by the tensor cores, so each on SMs of its own takes less time than one after the
// other. Shared by the CUDA backend and the CPU tests.
#pragma once

#include "schedule/tile_walk.h"

namespace megamoe::schedule {

struct SmSplit {
  int gradients = 0;  ///< 0: one after the other
  int dx = 0;
};

/// From so many rows an expert on. dx lasts as long as its rows, a gradient that is added at least
/// as long as its memory takes, so with fewer rows dx ends early and its SMs are idle. Measured at
/// 512 and 1,024 rows only (docs/perf_log.md, section 21).
inline constexpr int kLeastRowsBesideDx = 512;

/// Whole clusters of `num_sms` SMs, 54 and 78 of 132: the gradient of down is a third of the
/// products, and adds.
constexpr SmSplit split_sms(int num_sms, int expected_group_rows) {
  constexpr int kGradientParts = 9;
  constexpr int kParts = 22;
  if (expected_group_rows < kLeastRowsBesideDx) return {};
  const int num_clusters = num_sms / kClusterSize;
  const int num_gradient_clusters = num_clusters * kGradientParts / kParts;
  if (num_gradient_clusters == 0) return {};
  return {num_gradient_clusters * kClusterSize,
          (num_clusters - num_gradient_clusters) * kClusterSize};
}

}  // namespace megamoe::schedule
