// The auxiliary loss of one token: what it adds to the load, and its gradient by the scores.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>

#include "megamoe/router.h"
#include "routing/router_scores.h"

namespace megamoe::detail {

/// Scores are turned into the probabilities of P_j by this divisor: softmax scores are
/// probabilities already.
template <class Real>
Real probability_divisor(ScoreFunction function, std::span<const Real> scores_E) {
  if (function == ScoreFunction::softmax) return 1;
  return std::accumulate(scores_E.begin(), scores_E.end(), Real(0)) +
         static_cast<Real>(kScoreSumGuard);
}

/// slopes_j = d(aux loss)/d(probability of expert j), equal for all tokens as f_j is held constant.
template <class Real>
void compute_aux_slopes(const RouterConfig& config, const RouterLoad& global_load,
                        double d_aux_loss, std::span<Real> slopes_E) {
  const auto slots = static_cast<double>(global_load.num_slots());
  const auto tokens = static_cast<double>(global_load.num_tokens());
  for (std::size_t j = 0; j < slopes_E.size(); ++j) {
    const auto count = static_cast<double>(global_load.count(static_cast<std::int64_t>(j)));
    const double share = slots > 0 ? count / slots : 0.0;
    slopes_E[j] =
        static_cast<Real>(d_aux_loss * static_cast<double>(config.aux_loss_alpha) *
                          static_cast<double>(config.num_experts) * share / std::max(tokens, 1.0));
  }
}

/// Adds the auxiliary loss' gradient to the gradient by the scores.
template <class Real>
void add_aux_gradient(ScoreFunction function, std::span<const Real> scores_E,
                      std::span<const Real> slopes_E, std::span<Real> d_scores_E) {
  const Real divisor = probability_divisor(function, scores_E);
  Real mean = 0;
  if (function == ScoreFunction::sigmoid) {
    for (std::size_t j = 0; j < scores_E.size(); ++j) {
      mean += slopes_E[j] * (scores_E[j] / divisor);
    }
  }
  for (std::size_t j = 0; j < scores_E.size(); ++j) {
    d_scores_E[j] += (slopes_E[j] - mean) / divisor;
  }
}

}  // namespace megamoe::detail
