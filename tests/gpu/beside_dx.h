// Layers whose fp32 weight gradients begin beside dx, on a stream of their own.
#pragma once

#include "layer_fixture.h"
#include "schedule/beside_dx.h"

namespace megamoe::verify {

/// Ranks with equally many tokens, a few more than make an expert's rows worth the split.
inline ProblemSpec spec_beside_dx(int num_ranks, std::int32_t num_experts = 4) {
  ProblemSpec spec;
  const std::int64_t slots = std::int64_t{schedule::kLeastRowsBesideDx} * num_experts;
  spec.tokens_per_rank.assign(num_ranks, slots / (spec.top_k * num_ranks) + 3);
  spec.hidden_dim = 128;
  spec.intermediate_dim = 192;
  spec.num_experts = num_experts;
  spec.seed = 11;
  return spec;
}

inline RunOptions options_beside_dx() {
  RunOptions options;
  options.weight_gradient_mode = WeightGradientMode::accumulate_fp32;
  options.initial_gradient = 0.25F;
  return options;
}

}  // namespace megamoe::verify
