// Weights of one token's slots from its scores, and their gradient.
//
// A share is a weight before the scale. An id of -1 is an empty slot; ids may repeat, and then each
// slot counts. All sums run by rising slot.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

#include "megamoe/router.h"
#include "routing/router_scores.h"

namespace megamoe::detail {

/// Calls visit(slot, expert) for the non-empty slots.
template <class Visit>
void for_each_slot(std::span<const std::int32_t> ids_K, const Visit& visit) {
  for (std::size_t k = 0; k < ids_K.size(); ++k) {
    if (ids_K[k] >= 0) visit(k, static_cast<std::size_t>(ids_K[k]));
  }
}

/// Softmax scores divided by their sum are the softmax over the slots alone. Computed as that from
/// the logits, since scores of unlikely experts (forced, or chosen for their bias) underflow and
/// 0 / 0 would follow.
template <class Real>
void softmax_over_slots(std::span<const Real> logits_E, std::span<const std::int32_t> ids_K,
                        std::span<Real> shares_K) {
  Real highest = -std::numeric_limits<Real>::infinity();
  for_each_slot(ids_K,
                [&](std::size_t, std::size_t j) { highest = std::max(highest, logits_E[j]); });
  Real sum = 0;
  for_each_slot(ids_K, [&](std::size_t k, std::size_t j) {
    shares_K[k] = std::exp(logits_E[j] - highest);
    sum += shares_K[k];
  });
  for_each_slot(ids_K, [&](std::size_t k, std::size_t) { shares_K[k] /= sum; });
}

template <class Real>
Real guarded_score_sum(std::span<const Real> scores_E, std::span<const std::int32_t> ids_K) {
  Real sum = 0;
  for_each_slot(ids_K, [&](std::size_t, std::size_t j) { sum += scores_E[j]; });
  return sum + static_cast<Real>(kScoreSumGuard);
}

template <class Real>
void compute_shares(const RouterConfig& config, std::span<const Real> logits_E,
                    std::span<const Real> scores_E, std::span<const std::int32_t> ids_K,
                    std::span<Real> shares_K) {
  std::ranges::fill(shares_K, Real(0));
  if (config.weight_norm == WeightNorm::sum_to_one &&
      config.score_function == ScoreFunction::softmax) {
    softmax_over_slots(logits_E, ids_K, shares_K);
    return;
  }
  for_each_slot(ids_K, [&](std::size_t k, std::size_t j) { shares_K[k] = scores_E[j]; });
  if (config.weight_norm == WeightNorm::sum_to_one) {
    const Real sum = guarded_score_sum(scores_E, ids_K);
    for (Real& share : shares_K) share /= sum;
  }
}

/// <shares, d_shares> over the non-empty slots, where d_shares = scale * d_weights.
template <class Real>
Real share_mean(Real scale, std::span<const std::int32_t> ids_K, std::span<const Real> shares_K,
                std::span<const Real> d_weights_K) {
  Real mean = 0;
  for_each_slot(
      ids_K, [&](std::size_t k, std::size_t) { mean += shares_K[k] * (scale * d_weights_K[k]); });
  return mean;
}

/// Adds the gradient of all shares but softmax_over_slots' to the gradient by the scores.
template <class Real>
void add_share_gradient(const RouterConfig& config, std::span<const Real> scores_E,
                        std::span<const std::int32_t> ids_K, std::span<const Real> shares_K,
                        std::span<const Real> d_weights_K, std::span<Real> d_scores_E) {
  const auto scale = static_cast<Real>(config.scale);
  Real mean = 0;
  Real sum = 1;
  if (config.weight_norm == WeightNorm::sum_to_one) {
    mean = share_mean(scale, ids_K, shares_K, d_weights_K);
    sum = guarded_score_sum(scores_E, ids_K);
  }
  for_each_slot(ids_K, [&](std::size_t k, std::size_t j) {
    d_scores_E[j] += (scale * d_weights_K[k] - mean) / sum;
  });
}

/// Adds the gradient of softmax_over_slots to the gradient by the logits. Experts without a slot
/// get none, exactly.
template <class Real>
void add_slot_softmax_gradient(const RouterConfig& config, std::span<const std::int32_t> ids_K,
                               std::span<const Real> shares_K, std::span<const Real> d_weights_K,
                               std::span<Real> d_logits_E) {
  const auto scale = static_cast<Real>(config.scale);
  const Real mean = share_mean(scale, ids_K, shares_K, d_weights_K);
  for_each_slot(ids_K, [&](std::size_t k, std::size_t j) {
    d_logits_E[j] += shares_K[k] * (scale * d_weights_K[k] - mean);
  });
}

}  // namespace megamoe::detail
