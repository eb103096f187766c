// One token's whole backward, from the gradient of its weights to the gradient of its logits.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "routing/router_balance.h"
#include "routing/router_scores.h"
#include "routing/router_weights.h"

namespace megamoe::detail {

/// What the forward saved of a token.
template <class Real>
struct RoutedToken {
  std::span<const Real> scores_E;
  std::span<const std::int32_t> expert_ids_K;
  std::span<const Real> shares_K;
};

/// Stores d_logits_E. aux_slopes_E is empty when there is no auxiliary loss.
template <class Real>
void token_backward(const RouterConfig& config, const RoutedToken<Real>& token,
                    std::span<const Real> d_weights_K, std::span<const Real> aux_slopes_E,
                    std::span<Real> d_logits_E) {
  const bool shares_bypass_scores = config.score_function == ScoreFunction::softmax &&
                                    config.weight_norm == WeightNorm::sum_to_one;
  std::ranges::fill(d_logits_E, Real(0));  // holds the gradient by the scores until scores_backward
  if (!shares_bypass_scores) {
    add_share_gradient(config, token.scores_E, token.expert_ids_K, token.shares_K, d_weights_K,
                       d_logits_E);
  }
  if (!aux_slopes_E.empty()) {
    add_aux_gradient(config.score_function, token.scores_E, aux_slopes_E, d_logits_E);
  }
  scores_backward(config.score_function, token.scores_E, d_logits_E);
  if (shares_bypass_scores) {
    add_slot_softmax_gradient(config, token.expert_ids_K, token.shares_K, d_weights_K, d_logits_E);
  }
}

}  // namespace megamoe::detail
