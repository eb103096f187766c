#include "verify/judge.h"

#include <algorithm>

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

Comparison judge_router_gradient(const Problem& problem, const RawTensor& drouter,
                                 const OracleResult& exact, const OracleResult& rounded) {
  const RouterOracle router = router_oracle(problem);
  const std::vector<std::int64_t> shape_EH = {router.num_experts, router.hidden_dim};
  const auto gradient = [&](const OracleResult& layer) {
    return HostTensor{
        shape_EH, router_gradients(router, problem.expert_ids_TK, layer.dweights_TK).dweight_EH};
  };
  return compare("drouter", drouter.to_host(), gradient(exact), gradient(rounded),
                 {.slice_name = "expert", .reduction_length = router.num_tokens});
}

}  // namespace

std::vector<Comparison> judge_layer(const Problem& problem, const LayerTensors& tensors,
                                    const RunOptions& options, const RawTensor* drouter) {
  const ProblemSpec& spec = problem.spec;
  const GradientStorage storage = options.weight_gradient_mode == WeightGradientMode::store_bf16
                                      ? GradientStorage::bf16
                                      : GradientStorage::fp32;
  const OracleInput input = oracle_input(problem);
  const OracleResult exact = evaluate(input, Rounding::none, storage);
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
  const CompareOptions by_expert{.slice_name = "expert", .reduction_length = most_rows(problem)};
  judge("y", tensors.y.to_host(), shape_TH, &OracleResult::y_TH,
        {.reduction_length = input.intermediate_dim});
  judge("dx", tensors.dx.to_host(), shape_TH, &OracleResult::dx_TH,
        {.reduction_length = 2 * input.intermediate_dim});
  if (is_gated(spec.activation.kind)) {
    judge("dgate", gradient_without_initial(tensors.dgate, options), shape_EIH,
          &OracleResult::dgate_EIH, by_expert);
  }
  judge("dup", gradient_without_initial(tensors.dup, options), shape_EIH, &OracleResult::dup_EIH,
        by_expert);
  judge("ddown", gradient_without_initial(tensors.ddown, options), shape_EHI,
        &OracleResult::ddown_EHI, by_expert);
  judge("dweights", tensors.dweights.to_host(), shape_TK, &OracleResult::dweights_TK,
        {.slice_name = "slot",
         .slice_dims = 2,
         .reduction_length = input.intermediate_dim,
         .slice_norms = exact.dweights_scale_TK,
         .slice_floors = exact.dweights_step_TK});
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
