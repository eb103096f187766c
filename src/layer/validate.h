// What the host can see wrong in the arguments of a call. Every function throws Error naming the
// argument.
#pragma once

#include "megamoe/layer.h"

namespace megamoe {

/// The numbers that tensor shapes are checked against.
struct ExpectedShape {
  MoeShape shape;
  std::int32_t experts_per_rank = 0;
  bool gated = true;
  WeightGradientMode weight_gradient_mode = WeightGradientMode::store_bf16;
};

ExpectedShape expected_shape(const LayerConfig& config, int num_ranks);

/// Returns T.
std::int64_t validate_forward(const ExpectedShape& expected, const ForwardInput& input,
                              const ForwardOutput& output);

/// `num_tokens` is the T of the forward call.
void validate_backward(const ExpectedShape& expected, std::int64_t num_tokens,
                       const BackwardInput& input, const BackwardOutput& output);

}  // namespace megamoe
