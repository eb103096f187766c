// The router in naive fp64: scores, selection, weights and the gradient of its weight. Independent
// of the library's router, which it judges. Shapes as in oracle.h.
#pragma once

#include <cstdint>
#include <vector>

namespace megamoe::verify {

struct RouterOracle {
  enum class Scores : std::uint8_t { softmax, sigmoid };
  enum class Renormalise : std::uint8_t { off, on };

  std::int64_t num_tokens = 0;
  std::int64_t hidden_dim = 0;
  std::int64_t num_experts = 0;
  std::int64_t top_k = 0;
  Scores scores = Scores::softmax;
  Renormalise renormalise = Renormalise::off;
  double scale = 1.0;
  std::vector<double> x_TH;
  std::vector<double> weight_EH;
  std::vector<double> selection_bias_E;  ///< added to the scores for selection only; may be empty
};

/// Inner product of each token with each expert's row, [T, E].
std::vector<double> router_logits(const RouterOracle& router);

/// score of each expert for each token, [T, E].
std::vector<double> router_scores(const RouterOracle& router);

/// The K experts of highest score (plus bias) of each token, highest first, ties to the lower id.
/// K <= E.
std::vector<std::int32_t> select_experts(const RouterOracle& router);

/// w_tk = scale * s(id_tk), divided by the sum over the token's occupied slots when renormalising.
/// 0 for empty slots. A doubled id has the score in both of its slots.
std::vector<double> routing_weights(const RouterOracle& router,
                                    const std::vector<std::int32_t>& expert_ids_TK);

struct RouterGradients {
  std::vector<double> dweight_EH;
  std::vector<double> dx_TH;
};

/// Gradients through routing_weights() for the given ids; the selection itself is constant.
RouterGradients router_gradients(const RouterOracle& router,
                                 const std::vector<std::int32_t>& expert_ids_TK,
                                 const std::vector<double>& dweights_TK);

/// By how much a selection differs from a right one: the largest amount, over tokens, by which an
/// expert left out exceeds the lowest one chosen (score plus bias). 0 for select_experts() itself;
/// about the rounding error of the scores for a selection made in fp32.
double selection_regret(const RouterOracle& router, const std::vector<std::int32_t>& expert_ids_TK);

}  // namespace megamoe::verify
