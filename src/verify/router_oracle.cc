#include "verify/router_oracle.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace megamoe::verify {
namespace {

double selection_value(const RouterOracle& router, const std::vector<double>& scores_TE,
                       std::int64_t token, std::int64_t expert) {
  const double bias = router.selection_bias_E.empty() ? 0.0 : router.selection_bias_E[expert];
  return scores_TE[token * router.num_experts + expert] + bias;
}

/// d(w)/d(score) applied to dweights: the gradient with respect to each expert's score, [T, E].
std::vector<double> score_gradients(const RouterOracle& router,
                                    const std::vector<double>& scores_TE,
                                    const std::vector<std::int32_t>& expert_ids_TK,
                                    const std::vector<double>& dweights_TK) {
  std::vector<double> dscores_TE(scores_TE.size(), 0.0);
  for (std::int64_t token = 0; token < router.num_tokens; ++token) {
    const std::int32_t* ids = &expert_ids_TK[token * router.top_k];
    const double* dweights = &dweights_TK[token * router.top_k];
    const double* scores = &scores_TE[token * router.num_experts];
    double score_sum = 0.0;
    double weighted_gradient_sum = 0.0;
    for (std::int64_t k = 0; k < router.top_k; ++k) {
      if (ids[k] < 0) continue;
      score_sum += scores[ids[k]];
      weighted_gradient_sum += scores[ids[k]] * dweights[k];
    }
    for (std::int64_t k = 0; k < router.top_k; ++k) {
      if (ids[k] < 0) continue;
      double gradient = router.scale * dweights[k];
      if (router.renormalise == RouterOracle::Renormalise::on) {
        gradient = router.scale *
                   (dweights[k] / score_sum - weighted_gradient_sum / (score_sum * score_sum));
      }
      dscores_TE[token * router.num_experts + ids[k]] += gradient;
    }
  }
  return dscores_TE;
}

}  // namespace

std::vector<double> router_logits(const RouterOracle& router) {
  std::vector<double> logits_TE(router.num_tokens * router.num_experts);
  for (std::int64_t token = 0; token < router.num_tokens; ++token) {
    const double* x = &router.x_TH[token * router.hidden_dim];
    for (std::int64_t expert = 0; expert < router.num_experts; ++expert) {
      logits_TE[token * router.num_experts + expert] = std::inner_product(
          x, x + router.hidden_dim, &router.weight_EH[expert * router.hidden_dim], 0.0);
    }
  }
  return logits_TE;
}

std::vector<double> router_scores(const RouterOracle& router) {
  std::vector<double> scores_TE = router_logits(router);
  for (std::int64_t token = 0; token < router.num_tokens; ++token) {
    double* scores = &scores_TE[token * router.num_experts];
    if (router.scores == RouterOracle::Scores::sigmoid) {
      for (std::int64_t e = 0; e < router.num_experts; ++e) {
        scores[e] = 1.0 / (1.0 + std::exp(-scores[e]));
      }
      continue;
    }
    const double largest = *std::max_element(scores, scores + router.num_experts);
    double sum = 0.0;
    for (std::int64_t e = 0; e < router.num_experts; ++e) {
      scores[e] = std::exp(scores[e] - largest);
      sum += scores[e];
    }
    for (std::int64_t e = 0; e < router.num_experts; ++e) scores[e] /= sum;
  }
  return scores_TE;
}

std::vector<std::int32_t> select_experts(const RouterOracle& router) {
  const std::vector<double> scores_TE = router_scores(router);
  std::vector<std::int32_t> expert_ids_TK(router.num_tokens * router.top_k);
  std::vector<std::int32_t> order(router.num_experts);
  for (std::int64_t token = 0; token < router.num_tokens; ++token) {
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](std::int32_t left, std::int32_t right) {
      return selection_value(router, scores_TE, token, left) >
             selection_value(router, scores_TE, token, right);
    });
    std::copy_n(order.begin(), router.top_k, &expert_ids_TK[token * router.top_k]);
  }
  return expert_ids_TK;
}

std::vector<double> routing_weights(const RouterOracle& router,
                                    const std::vector<std::int32_t>& expert_ids_TK) {
  const std::vector<double> scores_TE = router_scores(router);
  std::vector<double> weights_TK(expert_ids_TK.size(), 0.0);
  for (std::int64_t token = 0; token < router.num_tokens; ++token) {
    double sum = 0.0;
    for (std::int64_t k = 0; k < router.top_k; ++k) {
      const std::int64_t slot = token * router.top_k + k;
      if (expert_ids_TK[slot] < 0) continue;
      weights_TK[slot] = scores_TE[token * router.num_experts + expert_ids_TK[slot]];
      sum += weights_TK[slot];
    }
    const double divisor = router.renormalise == RouterOracle::Renormalise::on ? sum : 1.0;
    for (std::int64_t k = 0; k < router.top_k; ++k) {
      const std::int64_t slot = token * router.top_k + k;
      if (expert_ids_TK[slot] >= 0) weights_TK[slot] *= router.scale / divisor;
    }
  }
  return weights_TK;
}

RouterGradients router_gradients(const RouterOracle& router,
                                 const std::vector<std::int32_t>& expert_ids_TK,
                                 const std::vector<double>& dweights_TK) {
  const std::vector<double> scores_TE = router_scores(router);
  const std::vector<double> dscores_TE =
      score_gradients(router, scores_TE, expert_ids_TK, dweights_TK);
  RouterGradients gradients;
  gradients.dweight_EH.assign(router.weight_EH.size(), 0.0);
  gradients.dx_TH.assign(router.x_TH.size(), 0.0);
  for (std::int64_t token = 0; token < router.num_tokens; ++token) {
    const double* scores = &scores_TE[token * router.num_experts];
    const double* dscores = &dscores_TE[token * router.num_experts];
    const double mean_gradient =
        std::inner_product(scores, scores + router.num_experts, dscores, 0.0);
    for (std::int64_t expert = 0; expert < router.num_experts; ++expert) {
      const double dlogit = router.scores == RouterOracle::Scores::softmax
                                ? scores[expert] * (dscores[expert] - mean_gradient)
                                : scores[expert] * (1.0 - scores[expert]) * dscores[expert];
      for (std::int64_t h = 0; h < router.hidden_dim; ++h) {
        const std::int64_t in_x = token * router.hidden_dim + h;
        const std::int64_t in_weight = expert * router.hidden_dim + h;
        gradients.dweight_EH[in_weight] += dlogit * router.x_TH[in_x];
        gradients.dx_TH[in_x] += dlogit * router.weight_EH[in_weight];
      }
    }
  }
  return gradients;
}

double selection_regret(const RouterOracle& router,
                        const std::vector<std::int32_t>& expert_ids_TK) {
  const std::vector<double> scores_TE = router_scores(router);
  double regret = 0.0;
  for (std::int64_t token = 0; token < router.num_tokens; ++token) {
    const auto first = expert_ids_TK.begin() + token * router.top_k;
    const auto last = first + router.top_k;
    double lowest_chosen = std::numeric_limits<double>::infinity();
    double highest_left_out = -std::numeric_limits<double>::infinity();
    for (std::int64_t expert = 0; expert < router.num_experts; ++expert) {
      const double value = selection_value(router, scores_TE, token, expert);
      if (std::find(first, last, expert) != last) {
        lowest_chosen = std::min(lowest_chosen, value);
      } else {
        highest_left_out = std::max(highest_left_out, value);
      }
    }
    regret = std::max(regret, highest_left_out - lowest_chosen);
  }
  return regret;
}

}  // namespace megamoe::verify
