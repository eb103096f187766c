#include "routing/router_check.h"

#include <cmath>
#include <limits>
#include <string>

#include "megamoe/error.h"

namespace megamoe::detail {
namespace {

std::string text(std::int64_t value) { return std::to_string(value); }

void check_bias_finite(const ConstTensorView& bias) {
  const auto* bias_E = static_cast<const float*>(bias.data);
  for (std::int64_t j = 0; j < bias.sizes[0]; ++j) {
    if (!std::isfinite(bias_E[j])) {
      refuse("selection_bias of expert " + text(j) + " is " + std::to_string(bias_E[j]) +
             "; biases must be finite");
    }
  }
}

void check_forced_ids(const ConstTensorView& ids, std::int64_t num_experts) {
  for (std::int64_t token = 0; token < ids.sizes[0]; ++token) {
    const auto* ids_K = row_of<std::int32_t>(ids, token);
    for (std::int64_t k = 0; k < ids.sizes[1]; ++k) {
      if (ids_K[k] >= -1 && ids_K[k] < num_experts) continue;
      throw Error(ErrorCode::expert_id_out_of_range,
                  "forced_ids of token " + text(token) + ", slot " + text(k) + " is " +
                      text(ids_K[k]) + "; ids must lie in [-1, " + text(num_experts) + ")");
    }
  }
}

/// Checks x and router_weight as far as they are present; a present pair must agree on H.
void check_product_operands(const ConstTensorView& x, const ConstTensorView& router_weight,
                            std::int64_t num_tokens, std::int64_t num_experts) {
  std::int64_t hidden = kAnySize;
  if (!x.absent()) {
    check_tensor("x", x, {DType::bf16}, {num_tokens, kAnySize}, Access::read);
    hidden = x.sizes[1];
    if (hidden < 1) refuse("x must have at least one hidden element, got " + describe(x));
  }
  if (!router_weight.absent()) {
    check_tensor("router_weight", router_weight, {DType::fp32, DType::bf16}, {num_experts, hidden},
                 Access::read);
  }
}

}  // namespace

void check_router_config(const RouterConfig& config) {
  const std::int64_t experts = config.num_experts;
  if (experts < 1 || experts > std::numeric_limits<std::int32_t>::max()) {
    refuse("num_experts must be at least 1 and fit int32, got " + text(experts));
  }
  if (config.top_k < 1 || config.top_k > experts) {
    refuse("top_k must lie in [1, num_experts = " + text(experts) + "], got " + text(config.top_k));
  }
  if (config.num_groups < 1 || config.num_groups > experts || experts % config.num_groups != 0) {
    refuse("num_groups must divide num_experts = " + text(experts) + ", got " +
           text(config.num_groups));
  }
  if (config.top_groups < 1 || config.top_groups > config.num_groups) {
    refuse("top_groups must lie in [1, num_groups = " + text(config.num_groups) + "], got " +
           text(config.top_groups));
  }
  const std::int64_t eligible = config.top_groups * (experts / config.num_groups);
  if (eligible < config.top_k) {
    refuse("top_groups = " + text(config.top_groups) + " leaves " + text(eligible) +
           " eligible experts, fewer than top_k = " + text(config.top_k));
  }
  if (config.score_function != ScoreFunction::softmax &&
      config.score_function != ScoreFunction::sigmoid) {
    refuse("score_function is not a ScoreFunction");
  }
  if (config.weight_norm != WeightNorm::none && config.weight_norm != WeightNorm::sum_to_one) {
    refuse("weight_norm is not a WeightNorm");
  }
  if (!std::isfinite(config.scale) || config.scale <= 0.0F) {
    refuse("scale must be finite and above 0, got " + std::to_string(config.scale));
  }
  if (!std::isfinite(config.aux_loss_alpha) || config.aux_loss_alpha < 0.0F) {
    refuse("aux_loss_alpha must be finite and at least 0, got " +
           std::to_string(config.aux_loss_alpha));
  }
}

RouterCallShape check_forward(const RouterConfig& config, const RouterInputs& inputs,
                              const RouterOutputs& outputs) {
  const std::int64_t experts = config.num_experts;
  RouterCallShape shape{0, config.top_k};
  if (!inputs.logits.absent()) {
    if (!inputs.x.absent()) refuse("x must be absent when logits are given");
    if (!inputs.router_weight.absent()) {
      refuse("router_weight must be absent when logits are given");
    }
    check_tensor("logits", inputs.logits, {DType::fp32, DType::bf16}, {kAnySize, experts},
                 Access::read);
    shape.num_tokens = inputs.logits.sizes[0];
  } else {
    if (inputs.x.absent()) refuse("x is absent, and so are logits: one of them is needed");
    if (inputs.router_weight.absent()) refuse("router_weight is absent: x needs it");
    check_product_operands(inputs.x, inputs.router_weight, kAnySize, experts);
    shape.num_tokens = inputs.x.sizes[0];
  }
  if (shape.num_tokens > std::numeric_limits<std::int64_t>::max() / 8 / experts) {
    refuse("logits [" + text(shape.num_tokens) + ", " + text(experts) +
           "] exceed the address space");
  }
  if (!inputs.selection_bias.absent()) {
    check_tensor("selection_bias", inputs.selection_bias, {DType::fp32}, {experts}, Access::read);
    check_bias_finite(inputs.selection_bias);
  }
  if (!inputs.forced_ids.absent()) {
    check_tensor("forced_ids", inputs.forced_ids, {DType::int32}, {shape.num_tokens, kAnySize},
                 Access::read);
    shape.num_slots = inputs.forced_ids.sizes[1];
    if (shape.num_slots < 1) refuse("forced_ids must have at least one slot a token");
    check_forced_ids(inputs.forced_ids, experts);
  }
  check_tensor("expert_ids", outputs.expert_ids, {DType::int32},
               {shape.num_tokens, shape.num_slots}, Access::write);
  check_tensor("weights", outputs.weights, {DType::fp32}, {shape.num_tokens, shape.num_slots},
               Access::write);
  return shape;
}

void check_logits_finite(const float* logits_TE, std::int64_t num_tokens,
                         std::int64_t num_experts) {
  for (std::int64_t i = 0; i < num_tokens * num_experts; ++i) {
    if (std::isfinite(logits_TE[i])) continue;
    refuse("logits of token " + text(i / num_experts) + ", expert " + text(i % num_experts) +
           " is " + std::to_string(logits_TE[i]) + "; logits must be finite");
  }
}

void check_context(const RouterConfig& config, const RouterContext& context) {
  if (!context.ready()) refuse("context holds no forward");
  if (context.config() != config) {
    refuse("context was filled by a router with another configuration");
  }
}

void check_backward(const RouterConfig& config, const RouterContext& context,
                    const RouterBackwardInputs& inputs, const RouterBackwardOutputs& outputs) {
  check_context(config, context);
  const std::int64_t tokens = context.num_tokens();
  const std::int64_t experts = config.num_experts;
  check_tensor("d_weights", inputs.d_weights, {DType::fp32},
               {tokens, context.expert_ids().sizes[1]}, Access::read);
  check_product_operands(inputs.x, inputs.router_weight, tokens, experts);
  if (!outputs.d_logits.absent()) {
    check_tensor("d_logits", outputs.d_logits, {DType::fp32}, {tokens, experts}, Access::write);
  }
  if (!outputs.d_x.absent()) {
    if (inputs.router_weight.absent()) refuse("router_weight is absent: d_x needs it");
    check_tensor("d_x", outputs.d_x, {DType::fp32}, {tokens, inputs.router_weight.sizes[1]},
                 Access::write);
  }
  if (!outputs.d_router_weight.absent()) {
    if (inputs.x.absent()) refuse("x is absent: d_router_weight needs it");
    check_tensor("d_router_weight", outputs.d_router_weight, {DType::fp32},
                 {experts, inputs.x.sizes[1]}, Access::write);
  }
  if (config.aux_loss_alpha == 0.0F) return;
  if (inputs.global_load == nullptr) {
    refuse("global_load is absent: aux_loss_alpha is not 0, and its gradient would be lost");
  }
  check_load("global_load", *inputs.global_load, experts);
  if (inputs.global_load->num_tokens() < tokens) {
    refuse("global_load covers " + text(inputs.global_load->num_tokens()) +
           " tokens, fewer than the " + text(tokens) + " of this call alone");
  }
  if (!std::isfinite(inputs.d_aux_loss)) {
    refuse("d_aux_loss must be finite, got " + std::to_string(inputs.d_aux_loss));
  }
}

void check_load(const char* name, const RouterLoad& load, std::int64_t num_experts) {
  if (load.num_experts() != num_experts) {
    refuse(std::string(name) + " must have " + text(num_experts) + " experts, got " +
           text(load.num_experts()));
  }
  for (const double value : load.values()) {
    if (!(value >= 0.0 && value <= 0x1p53)) {
      refuse(std::string(name) + " holds " + std::to_string(value) + ", which no sum of loads is");
    }
  }
}

}  // namespace megamoe::detail
