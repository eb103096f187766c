// Times forward and backward of one layer on thread ranks.
#pragma once

#include <cstdint>
#include <vector>

#include "bench/samples.h"
#include "megamoe/config.h"

namespace megamoe::bench {

struct LayerTimes {
  SamplesMs forward_ms;  ///< from the moment that all ranks are ready until the last has finished
  SamplesMs backward_ms;
};

/// Runs `num_repeats` forward and backward passes after one that is not counted. Every rank has
/// config.shape.max_tokens tokens; `ids_RTK` holds each rank's ids. Throws Error.
LayerTimes time_layer(const LayerConfig& config,
                      const std::vector<std::vector<std::int32_t>>& ids_RTK, int num_repeats);

/// What users get credit for, over all ranks; recomputed products do not count.
constexpr double forward_flops(std::int64_t num_rows, const MoeShape& shape) {
  return 6.0 * static_cast<double>(num_rows) * static_cast<double>(shape.hidden_dim) *
         static_cast<double>(shape.intermediate_dim);
}
constexpr double backward_flops(std::int64_t num_rows, const MoeShape& shape) {
  return 2.0 * forward_flops(num_rows, shape);
}

}  // namespace megamoe::bench
