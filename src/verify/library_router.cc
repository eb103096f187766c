#include "verify/library_router.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace megamoe::verify {
namespace {

RouterConfig router_config(const ProblemSpec& spec) {
  RouterConfig config;
  config.num_experts = spec.num_experts;
  config.top_k = std::min(spec.top_k, spec.num_experts);  // forced ids bring their own K
  return config;
}

/// fp32 work of one score: a product over H, then four elementwise steps (subtraction, exp, sum,
/// division), each counted as one addition of tensor-core depth.
std::int64_t score_reduction_length(const ProblemSpec& spec) { return spec.hidden_dim + 4 * 16; }

Comparison judge_ids(const Problem& problem, const Problem& routed) {
  Comparison result;
  result.name = "expert_ids";
  if (routed.expert_ids_TK.size() != problem.expert_ids_TK.size()) {
    result.failure = "missing";
  } else if (forces_ids(problem.spec.routing)) {
    const auto differs = std::mismatch(routed.expert_ids_TK.begin(), routed.expert_ids_TK.end(),
                                       problem.expert_ids_TK.begin());
    if (differs.first != routed.expert_ids_TK.end()) {
      result.failure = "slot " + std::to_string(differs.first - routed.expert_ids_TK.begin()) +
                       " is " + std::to_string(*differs.first) + ", forced was " +
                       std::to_string(*differs.second);
    }
  } else {
    result.error = selection_regret(router_oracle(problem), routed.expert_ids_TK);
    result.allowed =
        4.0 * 0x1p-24 * static_cast<double>(score_reduction_length(problem.spec)) / 16.0;
    // Equal logits have equal scores in every precision: ties leave nothing to rounding.
    if (problem.spec.routing == RoutingPattern::ties &&
        routed.expert_ids_TK != problem.expert_ids_TK) {
      result.failure = "a tie did not go to the lower ids";
    } else if (!(result.error <= result.allowed)) {
      result.failure = "an expert was left out for one with a lower score";
    }
  }
  result.passed = result.failure.empty();
  return result;
}

/// By how much each token's weights may differ, relative to them. exp makes of an error in its
/// argument a relative one, and logits and their differences are rounded at their own size: with
/// logits up to L, half an ulp of L for each of the two, of 2 L for the difference and of 2 L where
/// exp scales it. Another eight for exp, the sum and the division.
std::vector<double> score_errors(const RouterOracle& router) {
  const std::vector<double> logits_TE = router_logits(router);
  std::vector<double> errors_T;
  for (std::int64_t token = 0; token < router.num_tokens; ++token) {
    double largest = 0.0;
    for (std::int64_t expert = 0; expert < router.num_experts; ++expert) {
      largest = std::max(largest, std::abs(logits_TE[token * router.num_experts + expert]));
    }
    errors_T.push_back(0x1p-24 * (6.0 * largest + 8.0));
  }
  return errors_T;
}

}  // namespace

LibraryRouter::LibraryRouter(const Problem& problem)
    : routed_(problem),
      router_(router_config(problem.spec)),
      contexts_R_(problem.spec.num_ranks()) {
  const ProblemSpec& spec = problem.spec;
  for (int rank = 0; rank < spec.num_ranks(); ++rank) {
    const std::int64_t first = spec.first_token(rank);
    const std::int64_t count = spec.tokens_per_rank[rank];
    RouterInputs inputs;
    inputs.x = tensor_view(problem.x_TH.data() + first * spec.hidden_dim, {count, spec.hidden_dim});
    inputs.router_weight =
        tensor_view(problem.router_weight_EH.data(), {spec.num_experts, spec.hidden_dim});
    if (!problem.selection_bias_E.empty()) {
      inputs.selection_bias = tensor_view(problem.selection_bias_E.data(), {spec.num_experts});
    }
    if (forces_ids(spec.routing)) {
      inputs.forced_ids =
          tensor_view(problem.expert_ids_TK.data() + first * spec.top_k, {count, spec.top_k});
    }
    std::int32_t* ids = routed_.expert_ids_TK.data() + first * spec.top_k;
    float* weights = routed_.weights_TK.data() + first * spec.top_k;
    std::fill_n(ids, count * spec.top_k, std::numeric_limits<std::int32_t>::min());
    std::fill_n(weights, count * spec.top_k, std::numeric_limits<float>::quiet_NaN());
    router_.forward(
        inputs, {tensor_view(ids, {count, spec.top_k}), tensor_view(weights, {count, spec.top_k})},
        contexts_R_[rank]);
  }
}

RawTensor LibraryRouter::weight_gradient(const RawTensor& dweights) {
  const ProblemSpec& spec = routed_.spec;
  RawTensor gradient(DType::fp32, {spec.num_experts, spec.hidden_dim});
  const auto* dweights_TK = reinterpret_cast<const float*>(dweights.bytes.data());
  for (int rank = 0; rank < spec.num_ranks(); ++rank) {
    const std::int64_t first = spec.first_token(rank);
    const std::int64_t count = spec.tokens_per_rank[rank];
    RouterBackwardInputs inputs;
    inputs.d_weights = tensor_view(dweights_TK + first * spec.top_k, {count, spec.top_k});
    inputs.x = tensor_view(routed_.x_TH.data() + first * spec.hidden_dim, {count, spec.hidden_dim});
    RouterBackwardOutputs outputs;
    outputs.d_router_weight = gradient.view();
    outputs.d_router_weight_write = rank == 0 ? GradWrite::store : GradWrite::accumulate;
    router_.backward(contexts_R_[rank], inputs, outputs);
  }
  return gradient;
}

std::vector<Comparison> judge_routing(const Problem& problem, const Problem& routed) {
  std::vector<Comparison> comparisons = {judge_ids(problem, routed)};
  HostTensor weights{{problem.spec.num_tokens(), problem.spec.top_k},
                     to_doubles(routed.weights_TK)};
  HostTensor wanted = weights;
  // Judged for the ids that were taken. Out of range ids have failed already and have no weight.
  std::vector<std::int32_t> ids = routed.expert_ids_TK;
  for (std::int32_t& id : ids) {
    if (id < 0 || id >= problem.spec.num_experts) id = -1;
  }
  const RouterOracle router = router_oracle(problem);
  wanted.values = routing_weights(router, ids);
  // fp32 throughout: no step of bf16 is allowed.
  std::vector<double> floors_T = score_errors(router);
  for (std::size_t token = 0; token < floors_T.size(); ++token) {
    const double* of_token = &wanted.values[token * problem.spec.top_k];
    floors_T[token] *=
        std::sqrt(std::inner_product(of_token, of_token + problem.spec.top_k, of_token, 0.0));
  }
  comparisons.push_back(compare(
      "weights", weights, wanted, wanted,
      {.reduction_length = score_reduction_length(problem.spec), .slice_floors = floors_T}));
  return comparisons;
}

}  // namespace megamoe::verify
