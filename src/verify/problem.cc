#include "verify/problem.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <numeric>
#include <stdexcept>

namespace megamoe::verify {
namespace {

/// One random stream a tensor.
enum Stream : std::uint64_t {
  stream_x = 1,
  stream_dy,
  stream_gate,
  stream_up,
  stream_down,
  stream_router,
};

/// SplitMix64's output function: every input bit changes every output bit.
std::uint64_t mix(std::uint64_t value) {
  value += 0x9e3779b97f4a7c15U;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9U;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebU;
  return value ^ (value >> 31);
}

std::vector<bf16> normal_bf16(std::int64_t count, std::uint64_t seed, Stream stream, double scale) {
  std::vector<bf16> values(count);
  for (std::int64_t i = 0; i < count; ++i) {
    values[i] = to_bf16(static_cast<float>(scale * normal_at(seed, stream, i)));
  }
  return values;
}

/// A difference of up to 0.4 between the first and the last expert: softmax scores of a random
/// router spread over about 0.3.
std::vector<float> falling_bias(std::int32_t num_experts) {
  std::vector<float> bias_E(num_experts);
  for (std::int32_t expert = 0; expert < num_experts; ++expert) {
    bias_E[expert] = 0.4F * std::exp2(-static_cast<float>(expert));
  }
  return bias_E;
}

void impose_pattern(const ProblemSpec& spec, std::vector<std::int32_t>& expert_ids_TK) {
  const std::int64_t top_k = spec.top_k;
  for (std::int64_t token = 0; token < spec.num_tokens(); ++token) {
    std::int32_t* ids = &expert_ids_TK[token * top_k];
    switch (spec.routing) {
      case RoutingPattern::one_expert:
        std::fill_n(ids, top_k, spec.num_experts - 1);
        break;
      case RoutingPattern::duplicates:
        if (token % 2 == 0) ids[top_k - 1] = ids[0];
        break;
      case RoutingPattern::holes:
        if (token % 4 == 0) ids[0] = -1;
        if (token % 4 == 1) ids[top_k - 1] = -1;
        if (token % 4 == 2) std::fill_n(ids, top_k, -1);
        break;
      case RoutingPattern::uniform:
      case RoutingPattern::skewed:
      case RoutingPattern::ties:
        break;
    }
  }
}

/// Top-k ids; with K > E (duplicates and one-expert only) the slots beyond E start over.
std::vector<std::int32_t> natural_ids(const RouterOracle& router) {
  if (router.top_k <= router.num_experts) return select_experts(router);
  RouterOracle narrow = router;
  narrow.top_k = router.num_experts;
  const std::vector<std::int32_t> narrow_ids = select_experts(narrow);
  std::vector<std::int32_t> expert_ids_TK(router.num_tokens * router.top_k);
  for (std::int64_t token = 0; token < router.num_tokens; ++token) {
    for (std::int64_t k = 0; k < router.top_k; ++k) {
      expert_ids_TK[token * router.top_k + k] = narrow_ids[token * narrow.top_k + k % narrow.top_k];
    }
  }
  return expert_ids_TK;
}

void check_spec(const ProblemSpec& spec) {
  if (spec.tokens_per_rank.empty() || spec.hidden_dim < 1 || spec.intermediate_dim < 1 ||
      spec.num_experts < 1 || spec.top_k < 1) {
    throw std::invalid_argument("a problem needs ranks and positive H, I, E and K");
  }
  if (*std::min_element(spec.tokens_per_rank.begin(), spec.tokens_per_rank.end()) < 0) {
    throw std::invalid_argument("a rank cannot have fewer than 0 tokens");
  }
  const bool may_repeat =
      spec.routing == RoutingPattern::one_expert || spec.routing == RoutingPattern::duplicates;
  if (spec.top_k > spec.num_experts && !may_repeat) {
    throw std::invalid_argument("top-k " + std::to_string(spec.top_k) + " of " +
                                std::to_string(spec.num_experts) +
                                " experts needs a routing pattern that repeats experts");
  }
}

}  // namespace

const char* to_string(RoutingPattern pattern) {
  switch (pattern) {
    case RoutingPattern::uniform:
      return "uniform";
    case RoutingPattern::skewed:
      return "skewed";
    case RoutingPattern::one_expert:
      return "one-expert";
    case RoutingPattern::duplicates:
      return "duplicates";
    case RoutingPattern::holes:
      return "holes";
    case RoutingPattern::ties:
      return "ties";
  }
  return "unknown";
}

std::int64_t ProblemSpec::num_tokens() const {
  return std::accumulate(tokens_per_rank.begin(), tokens_per_rank.end(), std::int64_t{0});
}

std::int64_t ProblemSpec::max_tokens() const {
  return *std::max_element(tokens_per_rank.begin(), tokens_per_rank.end());
}

std::int64_t ProblemSpec::first_token(int rank) const {
  return std::accumulate(tokens_per_rank.begin(), tokens_per_rank.begin() + rank, std::int64_t{0});
}

double normal_at(std::uint64_t seed, std::uint64_t stream, std::uint64_t index) {
  const std::uint64_t key = mix(mix(mix(seed) ^ stream) ^ index);
  constexpr double kUnit = 0x1p-53;
  const double radius_uniform = (static_cast<double>(key >> 11) + 1.0) * kUnit;  // in (0, 1]
  const double angle_uniform = static_cast<double>(mix(key) >> 11) * kUnit;
  return std::sqrt(-2.0 * std::log(radius_uniform)) *
         std::cos(2.0 * std::numbers::pi * angle_uniform);
}

Problem make_problem(const ProblemSpec& spec) {
  check_spec(spec);
  const std::int64_t num_hidden = spec.hidden_dim;
  const std::int64_t num_channels = spec.intermediate_dim;
  const std::int64_t num_activations = spec.num_tokens() * num_hidden;
  const std::int64_t num_weights = spec.num_experts * num_channels * num_hidden;
  const double hidden_scale = 1.0 / std::sqrt(static_cast<double>(num_hidden));
  const double channel_scale = 1.0 / std::sqrt(static_cast<double>(num_channels));

  Problem problem;
  problem.spec = spec;
  problem.x_TH = normal_bf16(num_activations, spec.seed, stream_x, 1.0);
  problem.dy_TH = normal_bf16(num_activations, spec.seed, stream_dy, 1.0);
  if (is_gated(spec.activation.kind)) {
    problem.gate_EIH = normal_bf16(num_weights, spec.seed, stream_gate, hidden_scale);
  }
  problem.up_EIH = normal_bf16(num_weights, spec.seed, stream_up, hidden_scale);
  problem.down_EHI = normal_bf16(num_weights, spec.seed, stream_down, channel_scale);
  problem.router_weight_EH.assign(spec.num_experts * num_hidden, 0.0F);
  if (spec.routing != RoutingPattern::ties) {
    for (std::size_t i = 0; i < problem.router_weight_EH.size(); ++i) {
      problem.router_weight_EH[i] =
          static_cast<float>(hidden_scale * normal_at(spec.seed, stream_router, i));
    }
  }
  if (spec.routing == RoutingPattern::skewed) {
    problem.selection_bias_E = falling_bias(spec.num_experts);
  }

  const RouterOracle router = router_oracle(problem);
  problem.expert_ids_TK = natural_ids(router);
  impose_pattern(spec, problem.expert_ids_TK);
  const std::vector<double> weights_TK = routing_weights(router, problem.expert_ids_TK);
  problem.weights_TK.assign(weights_TK.begin(), weights_TK.end());
  for (std::size_t slot = 0; slot < problem.weights_TK.size(); ++slot) {
    if (problem.expert_ids_TK[slot] < 0) {
      problem.weights_TK[slot] = std::numeric_limits<float>::quiet_NaN();
    }
  }
  return problem;
}

Problem with_perturbed_weight(Problem problem, ExpertWeight weight) {
  const auto& ids = problem.expert_ids_TK;
  const auto used = std::find_if(ids.begin(), ids.end(), [](std::int32_t id) { return id >= 0; });
  if (used == ids.end()) throw std::invalid_argument("no token goes to any expert");
  std::vector<bf16>& elements = weight == ExpertWeight::gate ? problem.gate_EIH
                                : weight == ExpertWeight::up ? problem.up_EIH
                                                             : problem.down_EHI;
  if (elements.empty()) throw std::invalid_argument("the activation has no gate");
  bf16& element = elements[*used * problem.spec.hidden_dim * problem.spec.intermediate_dim];
  element = to_bf16(to_float(element) + 1.0F);
  return problem;
}

OracleInput oracle_input(const Problem& problem) {
  OracleInput input;
  input.num_tokens = problem.spec.num_tokens();
  input.hidden_dim = problem.spec.hidden_dim;
  input.intermediate_dim = problem.spec.intermediate_dim;
  input.num_experts = problem.spec.num_experts;
  input.top_k = problem.spec.top_k;
  input.activation = problem.spec.activation;
  input.x_TH = to_doubles(problem.x_TH);
  input.dy_TH = to_doubles(problem.dy_TH);
  input.expert_ids_TK = problem.expert_ids_TK;
  input.weights_TK = to_doubles(problem.weights_TK);
  input.gate_EIH = to_doubles(problem.gate_EIH);
  input.up_EIH = to_doubles(problem.up_EIH);
  input.down_EHI = to_doubles(problem.down_EHI);
  return input;
}

RouterOracle router_oracle(const Problem& problem) {
  RouterOracle router;
  router.num_tokens = problem.spec.num_tokens();
  router.hidden_dim = problem.spec.hidden_dim;
  router.num_experts = problem.spec.num_experts;
  router.top_k = problem.spec.top_k;
  router.x_TH = to_doubles(problem.x_TH);
  router.weight_EH = to_doubles(problem.router_weight_EH);
  router.selection_bias_E = to_doubles(problem.selection_bias_E);
  return router;
}

std::vector<double> to_doubles(const std::vector<bf16>& values) {
  std::vector<double> doubles(values.size());
  std::transform(values.begin(), values.end(), doubles.begin(),
                 [](bf16 value) { return static_cast<double>(to_float(value)); });
  return doubles;
}

std::vector<double> to_doubles(const std::vector<float>& values) {
  return {values.begin(), values.end()};
}

}  // namespace megamoe::verify
