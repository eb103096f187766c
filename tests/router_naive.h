// A router written again in fp64 and in the plainest way, to test the library's against.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include "megamoe/router.h"

namespace megamoe::testing {

struct NaiveToken {
  std::vector<double> scores;
  std::vector<int> ids;
  std::vector<double> weights;
};

inline std::vector<double> naive_scores(ScoreFunction function, const std::vector<double>& logits) {
  std::vector<double> scores;
  scores.reserve(logits.size());
  double sum = 0;
  for (const double logit : logits) sum += std::exp(logit);
  for (const double logit : logits) {
    scores.push_back(function == ScoreFunction::softmax ? std::exp(logit) / sum
                                                        : 1 / (1 + std::exp(-logit)));
  }
  return scores;
}

/// Sorts (negated value, index) pairs: the best first, ties by index.
inline std::vector<int> naive_ranking(const std::vector<double>& values) {
  std::vector<std::pair<double, int>> order;
  for (std::size_t i = 0; i < values.size(); ++i) order.emplace_back(-values[i], i);
  std::sort(order.begin(), order.end());
  std::vector<int> ranking;
  ranking.reserve(order.size());
  for (const auto& [value, index] : order) ranking.push_back(index);
  return ranking;
}

inline std::vector<int> naive_select(const RouterConfig& config, const std::vector<double>& scores,
                                     const std::vector<float>& bias) {
  std::vector<double> choice(scores);
  for (std::size_t j = 0; j < bias.size(); ++j) choice[j] += static_cast<double>(bias[j]);
  const int group_size = static_cast<int>(config.num_experts / config.num_groups);
  std::vector<double> group_scores;
  for (int group = 0; group < config.num_groups; ++group) {
    std::vector<double> members(choice.begin() + group * group_size,
                                choice.begin() + (group + 1) * group_size);
    std::sort(members.rbegin(), members.rend());
    group_scores.push_back(members[0] + (group_size > 1 ? members[1] : 0.0));
  }
  std::vector<int> groups = naive_ranking(group_scores);
  groups.resize(static_cast<std::size_t>(config.top_groups));
  std::vector<int> ids;
  for (const int j : naive_ranking(choice)) {
    const bool eligible = std::count(groups.begin(), groups.end(), j / group_size) > 0;
    if (eligible && static_cast<std::int64_t>(ids.size()) < config.top_k) ids.push_back(j);
  }
  return ids;
}

/// Weights of given ids, by the formulas as they are written in papers.
inline NaiveToken naive_weights(const RouterConfig& config, const std::vector<double>& logits,
                                const std::vector<int>& ids) {
  NaiveToken token{naive_scores(config.score_function, logits), ids, {}};
  double sum = 0;
  for (const int id : ids) sum += id < 0 ? 0.0 : token.scores[static_cast<std::size_t>(id)];
  for (const int id : ids) {
    double weight = id < 0 ? 0.0 : token.scores[static_cast<std::size_t>(id)];
    if (config.weight_norm == WeightNorm::sum_to_one && id >= 0) weight /= sum;
    token.weights.push_back(weight * static_cast<double>(config.scale));
  }
  return token;
}

inline NaiveToken naive_route(const RouterConfig& config, const std::vector<double>& logits,
                              const std::vector<float>& bias) {
  return naive_weights(config, logits,
                       naive_select(config, naive_scores(config.score_function, logits), bias));
}

/// alpha * E * sum_j share_j * mean probability_j, where slot_shares are the f_j.
inline double naive_aux_loss(const RouterConfig& config,
                             const std::vector<std::vector<double>>& logits_TE,
                             const std::vector<double>& slot_shares) {
  double loss = 0;
  for (const auto& logits : logits_TE) {
    const std::vector<double> scores = naive_scores(config.score_function, logits);
    double sum = 0;
    for (const double score : scores) sum += score;
    for (std::size_t j = 0; j < scores.size(); ++j) loss += slot_shares[j] * scores[j] / sum;
  }
  return static_cast<double>(config.aux_loss_alpha) * static_cast<double>(config.num_experts) *
         loss / static_cast<double>(logits_TE.size());
}

/// Uniform in [low, high), equal on every machine.
inline double uniform(std::mt19937& generator, double low, double high) {
  return low + (high - low) * static_cast<double>(generator()) * 0x1p-32;
}

inline std::vector<float> random_floats(std::mt19937& generator, std::int64_t count, double low,
                                        double high) {
  std::vector<float> values(static_cast<std::size_t>(count));
  for (float& value : values) value = static_cast<float>(uniform(generator, low, high));
  return values;
}

inline std::vector<bf16> to_bf16_vector(const std::vector<float>& values) {
  std::vector<bf16> rounded(values.size());
  std::transform(values.begin(), values.end(), rounded.begin(), to_bf16);
  return rounded;
}

}  // namespace megamoe::testing
