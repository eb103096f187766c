// Runs the library's router on vectors, for tests.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "megamoe/router.h"

namespace megamoe::testing {

struct Routed {
  std::vector<std::int32_t> ids;
  std::vector<float> weights;
  RouterContext context;
};

/// All combinations of score function, normalisation and group limit; 12 experts, 4 slots.
inline std::vector<RouterConfig> all_router_configs() {
  std::vector<RouterConfig> configs;
  for (const ScoreFunction function : {ScoreFunction::softmax, ScoreFunction::sigmoid}) {
    for (const WeightNorm norm : {WeightNorm::none, WeightNorm::sum_to_one}) {
      for (const std::int64_t num_groups : {1, 4, 12}) {
        RouterConfig config;
        config.num_experts = 12;
        config.top_k = 4;
        config.score_function = function;
        config.weight_norm = norm;
        config.scale = 2.5F;
        config.num_groups = num_groups;
        config.top_groups = num_groups == 1 ? 1 : (num_groups == 4 ? 2 : 5);
        configs.push_back(config);
      }
    }
  }
  return configs;
}

inline std::string name_of(const RouterConfig& config) {
  return std::string(config.score_function == ScoreFunction::softmax ? "softmax" : "sigmoid") +
         (config.weight_norm == WeightNorm::none ? ", plain" : ", sum to one") + ", groups " +
         std::to_string(config.num_groups);
}

/// Sizes the outputs and runs the forward.
inline Routed route(Router& router, const RouterInputs& inputs) {
  Routed routed;
  const std::int64_t tokens = inputs.logits.absent() ? inputs.x.sizes[0] : inputs.logits.sizes[0];
  const std::int64_t slots =
      inputs.forced_ids.absent() ? router.config().top_k : inputs.forced_ids.sizes[1];
  routed.ids.assign(static_cast<std::size_t>(tokens * slots), -7);
  routed.weights.assign(static_cast<std::size_t>(tokens * slots), -7.0F);
  const RouterOutputs outputs{tensor_view(routed.ids.data(), {tokens, slots}),
                              tensor_view(routed.weights.data(), {tokens, slots})};
  router.forward(inputs, outputs, routed.context);
  return routed;
}

inline Routed route_logits(Router& router, const std::vector<float>& logits_TE) {
  const std::int64_t experts = router.config().num_experts;
  RouterInputs inputs;
  inputs.logits = tensor_view(logits_TE.data(),
                              {static_cast<std::int64_t>(logits_TE.size()) / experts, experts});
  return route(router, inputs);
}

/// The context's scores as a vector.
inline std::vector<float> scores_of(const RouterContext& context) {
  const ConstTensorView scores = context.scores();
  const auto* data = static_cast<const float*>(scores.data);
  return {data, data + scores.sizes[0] * scores.sizes[1]};
}

}  // namespace megamoe::testing
