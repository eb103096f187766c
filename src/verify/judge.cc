#include "verify/judge.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "verify/rounding_effects.h"

namespace megamoe::verify {
namespace {

/// Rows of the expert with most of them: the longest sum in a weight gradient.
std::int64_t most_rows(const Problem& problem) {
  std::vector<std::int64_t> rows_E(problem.spec.num_experts, 0);
  for (const std::int32_t id : problem.expert_ids_TK) {
    if (id >= 0) ++rows_E[id];
  }
  return *std::max_element(rows_E.begin(), rows_E.end());
}

HostTensor gradient_without_initial(const RawTensor& gradient, const RunOptions& options) {
  HostTensor host = gradient.to_host();
  if (options.weight_gradient_mode == WeightGradientMode::accumulate_fp32) {
    for (double& value : host.values) value -= options.initial_gradient;
  }
  return host;
}

/// What is added to in fp32 is rounded at the size of the sum, however small the gradient: half an
/// ulp each, beside an expert's other roundings.
void add_rounding_of_sums(const std::vector<double>& gradient, double initial,
                          std::vector<RoundingEffect>& effects_E) {
  const std::size_t size = gradient.size() / effects_E.size();
  for (std::size_t i = 0; i < gradient.size(); ++i) {
    if (gradient[i] == 0.0) continue;
    effects_E[i / size].add(0x1p-24 * (std::abs(initial) + std::abs(gradient[i])));
  }
}

/// The effects on dweights carried on to each expert's row: of weights that are softmax scores s,
/// d(logit e) / d(weight k) = s_e ([e = id_k] - s_id_k).
std::vector<RoundingEffect> effects_on_router(const RouterOracle& router,
                                              const std::vector<std::int32_t>& expert_ids_TK,
                                              const std::vector<RoundingEffect>& effects_TK) {
  const std::vector<double> scores_TE = router_scores(router);
  std::vector<RoundingEffect> effects_E(router.num_experts);
  for (std::int64_t token = 0; token < router.num_tokens; ++token) {
    const double* scores = &scores_TE[token * router.num_experts];
    const std::int32_t* ids = &expert_ids_TK[token * router.top_k];
    const double* x = &router.x_TH[token * router.hidden_dim];
    const double x_norm = std::sqrt(std::inner_product(x, x + router.hidden_dim, x, 0.0));
    for (std::int64_t k = 0; k < router.top_k; ++k) {
      if (ids[k] < 0) continue;
      const double twins = num_twins(ids, router.top_k, ids[k]);
      const RoundingEffect& effect = effects_TK[token * router.top_k + k];
      for (std::int64_t expert = 0; expert < router.num_experts; ++expert) {
        const double share = expert == ids[k] ? 1.0 - scores[ids[k]] : scores[ids[k]];
        const double slope = scores[expert] * share * x_norm;
        effects_E[expert].add(
            {twins * slope * slope * effect.squared, twins * slope * effect.largest});
      }
    }
  }
  return effects_E;
}

Comparison judge_router_gradient(const Problem& problem, const RawTensor& drouter,
                                 const OracleResult& exact, const OracleResult& rounded) {
  const RouterOracle router = router_oracle(problem);
  const std::vector<std::int64_t> shape_EH = {router.num_experts, router.hidden_dim};
  const auto gradient = [&](const OracleResult& layer) {
    return HostTensor{
        shape_EH, router_gradients(router, problem.expert_ids_TK, layer.dweights_TK).dweight_EH};
  };
  return compare("drouter", drouter.to_host(), gradient(exact), gradient(rounded),
                 {.slice_name = "expert",
                  .reduction_length = router.num_tokens,
                  .slice_effects =
                      effects_on_router(router, problem.expert_ids_TK, exact.effects.dweights_TK)});
}

}  // namespace

std::vector<Comparison> judge_layer(const Problem& problem, const LayerTensors& tensors,
                                    const RunOptions& options, const RawTensor* drouter) {
  const ProblemSpec& spec = problem.spec;
  const GradientStorage storage = options.weight_gradient_mode == WeightGradientMode::store_bf16
                                      ? GradientStorage::bf16
                                      : GradientStorage::fp32;
  const OracleInput input = oracle_input(problem);
  OracleResult exact = evaluate(input, Rounding::none, storage);
  const OracleResult rounded = evaluate(input, Rounding::contract, storage);
  const std::vector<std::int64_t> shape_TH = {input.num_tokens, input.hidden_dim};
  const std::vector<std::int64_t> shape_TK = {input.num_tokens, input.top_k};
  const std::vector<std::int64_t> shape_EIH = {input.num_experts, input.intermediate_dim,
                                               input.hidden_dim};
  const std::vector<std::int64_t> shape_EHI = {input.num_experts, input.hidden_dim,
                                               input.intermediate_dim};

  std::vector<Comparison> comparisons;
  const auto judge = [&](const char* name, const HostTensor& actual,
                         const std::vector<std::int64_t>& shape,
                         std::vector<double> OracleResult::*tensor, const CompareOptions& how) {
    comparisons.push_back(
        compare(name, actual, {shape, exact.*tensor}, {shape, rounded.*tensor}, how));
  };
  RoundingEffects& effects = exact.effects;
  if (options.weight_gradient_mode == WeightGradientMode::accumulate_fp32) {
    add_rounding_of_sums(exact.dgate_EIH, options.initial_gradient, effects.dgate_E);
    add_rounding_of_sums(exact.dup_EIH, options.initial_gradient, effects.dup_E);
    add_rounding_of_sums(exact.ddown_EHI, options.initial_gradient, effects.ddown_E);
  }
  const auto judge_gradient =
      [&](const char* name, const RawTensor& actual, const std::vector<std::int64_t>& shape,
          std::vector<double> OracleResult::*tensor, const std::vector<RoundingEffect>& effects_E) {
        judge(name, gradient_without_initial(actual, options), shape, tensor,
              {.slice_name = "expert",
               .reduction_length = most_rows(problem),
               .slice_effects = effects_E});
      };
  judge("y", tensors.y.to_host(), shape_TH, &OracleResult::y_TH,
        {.reduction_length = input.intermediate_dim, .slice_effects = effects.y_T});
  judge("dx", tensors.dx.to_host(), shape_TH, &OracleResult::dx_TH,
        {.reduction_length = 2 * input.intermediate_dim, .slice_effects = effects.dx_T});
  if (is_gated(spec.activation.kind)) {
    judge_gradient("dgate", tensors.dgate, shape_EIH, &OracleResult::dgate_EIH, effects.dgate_E);
  }
  judge_gradient("dup", tensors.dup, shape_EIH, &OracleResult::dup_EIH, effects.dup_E);
  judge_gradient("ddown", tensors.ddown, shape_EHI, &OracleResult::ddown_EHI, effects.ddown_E);
  judge("dweights", tensors.dweights.to_host(), shape_TK, &OracleResult::dweights_TK,
        {.slice_name = "slot",
         .slice_dims = 2,
         .reduction_length = input.intermediate_dim,
         .slice_norms = exact.dweights_scale_TK,
         .slice_effects = effects.dweights_TK});
  if (drouter != nullptr) {
    comparisons.push_back(judge_router_gradient(problem, *drouter, exact, rounded));
  }
  return comparisons;
}

bool all_passed(const std::vector<Comparison>& comparisons) {
  return std::all_of(comparisons.begin(), comparisons.end(),
                     [](const Comparison& comparison) { return comparison.passed; });
}

std::string failures(const std::vector<Comparison>& comparisons) {
  std::string text;
  for (const Comparison& comparison : comparisons) {
    if (!comparison.passed) text += comparison.name + ": " + comparison.failure + "\n";
  }
  return text;
}

}  // namespace megamoe::verify
