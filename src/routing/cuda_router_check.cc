#include "routing/cuda_router_check.h"

#include <cmath>
#include <string>

#include "megamoe/error.h"

namespace megamoe::detail {
namespace {

/// Blocks of eight tokens are numbered by 32 bits, with room.
constexpr std::int64_t kMaxTokens = std::int64_t{1} << 32;

void require_at_most(const char* name, std::int64_t value, std::int64_t most) {
  if (value <= most) return;
  refuse("cuda router: " + std::string(name) + " must be at most " + std::to_string(most) +
             ", got " + std::to_string(value),
         ErrorCode::unsupported);
}

std::int64_t check_logits(const RouterConfig& config, const ConstTensorView& logits) {
  check_tensor("logits", logits, {DType::fp32, DType::bf16}, {kAnySize, config.num_experts},
               Access::read);
  require_at_most("the number of tokens", logits.sizes[0], kMaxTokens);
  return logits.sizes[0];
}

/// Ids that are read; returns K.
std::int64_t check_ids(const char* name, const ConstTensorView& ids, std::int64_t num_tokens) {
  check_tensor(name, ids, {DType::int32}, {num_tokens, kAnySize}, Access::read);
  if (ids.sizes[1] < 1) refuse(std::string(name) + " must have at least one slot a token");
  require_at_most((std::string("the slots of ") + name).c_str(), ids.sizes[1], kMaxCudaRouterSlots);
  return ids.sizes[1];
}

void check_load_tensor(const char* name, const RouterConfig& config, const ConstTensorView& load,
                       Access access) {
  check_tensor(name, load, {DType::fp64}, {2 * config.num_experts + 1}, access);
}

}  // namespace

void check_cuda_router_config(const RouterConfig& config) {
  check_router_config(config);
  require_at_most("num_experts", config.num_experts, kMaxCudaRouterExperts);
  require_at_most("top_k", config.top_k, kMaxCudaRouterSlots);
  require_at_most("num_groups", config.num_groups, kMaxCudaRouterGroups);
}

RouterCallShape check_cuda_forward(const RouterConfig& config, const RouterInputs& inputs,
                                   const RouterOutputs& outputs) {
  const auto refuse_operand = [](const char* name, const ConstTensorView& operand) {
    if (operand.absent()) return;
    refuse("cuda router: " + std::string(name) +
               " must be absent; the product that makes logits is the caller's",
           ErrorCode::unsupported);
  };
  refuse_operand("x", inputs.x);
  refuse_operand("router_weight", inputs.router_weight);
  RouterCallShape shape{check_logits(config, inputs.logits), config.top_k};
  if (!inputs.selection_bias.absent()) {
    check_tensor("selection_bias", inputs.selection_bias, {DType::fp32}, {config.num_experts},
                 Access::read);
  }
  if (!inputs.forced_ids.absent()) {
    shape.num_slots = check_ids("forced_ids", inputs.forced_ids, shape.num_tokens);
  }
  check_tensor("expert_ids", outputs.expert_ids, {DType::int32},
               {shape.num_tokens, shape.num_slots}, Access::write);
  check_tensor("weights", outputs.weights, {DType::fp32}, {shape.num_tokens, shape.num_slots},
               Access::write);
  return shape;
}

RouterCallShape check_cuda_add_load(const RouterConfig& config, const ConstTensorView& logits,
                                    const ConstTensorView& expert_ids, const TensorView& load) {
  RouterCallShape shape{check_logits(config, logits), 0};
  shape.num_slots = check_ids("expert_ids", expert_ids, shape.num_tokens);
  check_load_tensor("load", config, load, Access::write);
  return shape;
}

void check_cuda_aux_loss(const RouterConfig& config, const ConstTensorView& global_load,
                         const TensorView& loss) {
  check_load_tensor("global_load", config, global_load, Access::read);
  check_tensor("loss", loss, {DType::fp32}, {1}, Access::write);
}

RouterCallShape check_cuda_backward(const RouterConfig& config,
                                    const CudaRouterBackwardInputs& inputs,
                                    const TensorView& d_logits) {
  RouterCallShape shape{check_logits(config, inputs.logits), 0};
  shape.num_slots = check_ids("expert_ids", inputs.expert_ids, shape.num_tokens);
  check_tensor("d_weights", inputs.d_weights, {DType::fp32}, {shape.num_tokens, shape.num_slots},
               Access::read);
  check_tensor("d_logits", d_logits, {DType::fp32}, {shape.num_tokens, config.num_experts},
               Access::write);
  if (config.aux_loss_alpha == 0.0F) return shape;
  if (inputs.global_load.absent()) {
    refuse("global_load is absent: aux_loss_alpha is not 0, and its gradient would be lost");
  }
  check_load_tensor("global_load", config, inputs.global_load, Access::read);
  if (!inputs.d_aux_loss.absent()) {
    check_tensor("d_aux_loss", inputs.d_aux_loss, {DType::fp32}, {1}, Access::read);
  }
  return shape;
}

void check_cuda_bias_update(const RouterConfig& config, const ConstTensorView& global_load,
                            float rate, const TensorView& selection_bias) {
  if (!std::isfinite(rate) || rate < 0.0F) {
    refuse("rate must be finite and at least 0, got " + std::to_string(rate));
  }
  check_load_tensor("global_load", config, global_load, Access::read);
  check_tensor("selection_bias", selection_bias, {DType::fp32}, {config.num_experts},
               Access::write);
}

}  // namespace megamoe::detail
