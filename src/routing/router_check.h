// Validation of the router's arguments; every refusal names the argument.
#pragma once

#include <cstdint>

#include "base/tensor_check.h"
#include "megamoe/router.h"

namespace megamoe::detail {

void check_router_config(const RouterConfig& config);

struct RouterCallShape {
  std::int64_t num_tokens;
  std::int64_t num_slots;  // K
};

/// Checks everything but the logits' values.
RouterCallShape check_forward(const RouterConfig& config, const RouterInputs& inputs,
                              const RouterOutputs& outputs);

/// Refuses the first NaN or infinity, naming its token and expert.
void check_logits_finite(const float* logits_TE, std::int64_t num_tokens, std::int64_t num_experts);

/// The context must hold a forward of a router with this configuration.
void check_context(const RouterConfig& config, const RouterContext& context);

void check_backward(const RouterConfig& config, const RouterContext& context,
                    const RouterBackwardInputs& inputs, const RouterBackwardOutputs& outputs);

/// `load` must have the number of experts and hold plausible sums.
void check_load(const char* name, const RouterLoad& load, std::int64_t num_experts);

/// Calls visit(id) for every id of a checked [T, K] matrix that is not an empty slot.
template <class Visit>
void for_each_id(const ConstTensorView& expert_ids, const Visit& visit) {
  for (std::int64_t token = 0; token < expert_ids.sizes[0]; ++token) {
    const auto* ids_K = row_of<std::int32_t>(expert_ids, token);
    for (std::int64_t k = 0; k < expert_ids.sizes[1]; ++k) {
      if (ids_K[k] >= 0) visit(ids_K[k]);
    }
  }
}

}  // namespace megamoe::detail
