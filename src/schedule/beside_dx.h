// The SMs on which weight gradients run beside dx, where they are added into fp32: adding is bound
// by memory, dx by the tensor cores, so side by side they take less time than one after the other.
// What is left when dx ends goes on on all SMs. Shared by the CUDA backend and the CPU tests.
#pragma once

#include "schedule/tile_walk.h"

namespace megamoe::schedule {

struct SmSplit {
  int gradients = 0;  ///< 0: one after the other
  int dx = 0;
};

/// From so many rows an expert on: with 1,024 and 512 rows side by side is faster, with 256 it is
/// 1% slower (docs/perf_log.md, section 24).
inline constexpr int kLeastRowsBesideDx = 512;

/// Whole clusters of `num_sms` SMs, 54 and 78 of 132. A third more or less for the gradients is
/// within 1.5% of it.
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
