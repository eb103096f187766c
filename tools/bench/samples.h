// Repeated timings of one thing.
#pragma once

#include <vector>

namespace megamoe::bench {

/// Milliseconds, one a repetition; never empty.
using SamplesMs = std::vector<double>;

struct Summary {
  double median_ms;
  double min_ms;
  double max_ms;
};

Summary summarize(SamplesMs samples_ms);

}  // namespace megamoe::bench
