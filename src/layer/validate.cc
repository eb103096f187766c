#include "layer/validate.h"

#include <cstdint>
#include <string>

#include "base/tensor_check.h"

namespace megamoe {
namespace {

using detail::Access;
using detail::check_tensor;
using detail::refuse;

/// T comes from this tensor alone: its first size is free up to max_tokens.
std::int64_t check_num_tokens(const char* name, const ConstTensorView& tensor,
                              std::int64_t max_tokens) {
  if (tensor.num_dims != 2) {
    refuse(std::string(name) + " must have two dimensions, [tokens, hidden], is " +
           describe(tensor));
  }
  const std::int64_t num_tokens = tensor.sizes[0];
  if (num_tokens < 0 || num_tokens > max_tokens) {
    refuse(std::string(name) + " has " + std::to_string(num_tokens) +
           " tokens; shape.max_tokens is " + std::to_string(max_tokens));
  }
  return num_tokens;
}

void check_experts(const ExpectedShape& expected, const ExpertWeights& experts) {
  const std::int64_t num_experts = expected.experts_per_rank;
  const std::int64_t hidden = expected.shape.hidden_dim;
  const std::int64_t intermediate = expected.shape.intermediate_dim;
  if (expected.gated) {
    check_tensor("experts.gate", experts.gate, {DType::bf16}, {num_experts, intermediate, hidden},
                 Access::read);
  } else if (!experts.gate.absent()) {
    refuse("experts.gate must be absent: the activation has no gate");
  }
  check_tensor("experts.up", experts.up, {DType::bf16}, {num_experts, intermediate, hidden},
               Access::read);
  check_tensor("experts.down", experts.down, {DType::bf16}, {num_experts, hidden, intermediate},
               Access::read);
}

void check_gradients(const ExpectedShape& expected, const ExpertGradients& gradients) {
  const std::int64_t num_experts = expected.experts_per_rank;
  const std::int64_t hidden = expected.shape.hidden_dim;
  const std::int64_t intermediate = expected.shape.intermediate_dim;
  const DType dtype =
      expected.weight_gradient_mode == WeightGradientMode::store_bf16 ? DType::bf16 : DType::fp32;
  if (expected.gated) {
    check_tensor("gradients of experts.gate", gradients.gate, {dtype},
                 {num_experts, intermediate, hidden}, Access::write);
  } else if (!gradients.gate.absent()) {
    refuse("gradients of experts.gate must be absent: the activation has no gate");
  }
  check_tensor("gradients of experts.up", gradients.up, {dtype},
               {num_experts, intermediate, hidden}, Access::write);
  check_tensor("gradients of experts.down", gradients.down, {dtype},
               {num_experts, hidden, intermediate}, Access::write);
}

}  // namespace

ExpectedShape expected_shape(const LayerConfig& config, int num_ranks) {
  return {config.shape, config.shape.num_experts / num_ranks, is_gated(config.activation.kind),
          config.weight_gradient_mode};
}

std::int64_t validate_forward(const ExpectedShape& expected, const ForwardInput& input,
                              const ForwardOutput& output) {
  const MoeShape& shape = expected.shape;
  const std::int64_t num_tokens = check_num_tokens("x", input.x, shape.max_tokens);
  check_tensor("x", input.x, {DType::bf16}, {num_tokens, shape.hidden_dim}, Access::read);
  check_tensor("expert_ids", input.expert_ids, {DType::int32}, {num_tokens, shape.top_k},
               Access::read);
  check_tensor("weights", input.weights, {DType::fp32}, {num_tokens, shape.top_k}, Access::read);
  check_tensor("y", output.y, {DType::bf16}, {num_tokens, shape.hidden_dim}, Access::write);
  check_experts(expected, input.experts);
  return num_tokens;
}

void validate_backward(const ExpectedShape& expected, std::int64_t num_tokens,
                       const BackwardInput& input, const BackwardOutput& output) {
  const MoeShape& shape = expected.shape;
  check_tensor("x", input.x, {DType::bf16}, {num_tokens, shape.hidden_dim}, Access::read);
  check_tensor("dy", input.dy, {DType::bf16}, {num_tokens, shape.hidden_dim}, Access::read);
  check_tensor("dx", output.dx, {DType::bf16}, {num_tokens, shape.hidden_dim}, Access::write);
  check_tensor("dweights", output.dweights, {DType::fp32}, {num_tokens, shape.top_k},
               Access::write);
  check_experts(expected, input.experts);
  check_gradients(expected, output.experts);
}

}  // namespace megamoe
