// Selection of one token's experts: bias, group limit, top-k with ties to the lower id.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

#include "megamoe/router.h"

namespace megamoe::detail {

template <class Real>
inline constexpr Real kMasked = -std::numeric_limits<Real>::infinity();

/// Index of the highest value, ties to the lower index. Some value must be above -infinity.
template <class Real>
std::size_t highest(std::span<const Real> values) {
  return static_cast<std::size_t>(std::max_element(values.begin(), values.end()) - values.begin());
}

/// Sum of the two highest scores (of the only one in a group of one); above the mask even where
/// the sum of two biases overflows.
template <class Real>
Real group_score(std::span<const Real> choice) {
  Real first = kMasked<Real>;
  Real second = kMasked<Real>;
  for (const Real score : choice) {
    second = std::max(second, std::min(first, score));
    first = std::max(first, score);
  }
  if (choice.size() == 1) return first;
  return std::max(first + second, std::numeric_limits<Real>::lowest());
}

/// Masks the experts of all but the top_groups best groups. The mask is -infinity: with a negative
/// bias an eligible expert may lie below 0, and a mask of 0 would prefer the masked ones.
template <class Real>
void apply_group_limit(const RouterConfig& config, std::span<Real> choice_E,
                       std::span<Real> group_scores_G) {
  const auto group_size = static_cast<std::size_t>(config.num_experts / config.num_groups);
  const auto group = [&](std::size_t index) {
    return choice_E.subspan(index * group_size, group_size);
  };
  for (std::size_t index = 0; index < group_scores_G.size(); ++index) {
    group_scores_G[index] = group_score<Real>(group(index));
  }
  // A chosen group is taken out of the search by the mask, which then tells it from the others.
  for (std::int64_t chosen = 0; chosen < config.top_groups; ++chosen) {
    group_scores_G[highest<Real>(group_scores_G)] = kMasked<Real>;
  }
  for (std::size_t index = 0; index < group_scores_G.size(); ++index) {
    if (group_scores_G[index] == kMasked<Real>) continue;
    std::ranges::fill(group(index), kMasked<Real>);
  }
}

/// Writes expert_ids_K by falling biased score. bias_E is empty or [E]; scores and biases are
/// finite. choice_E and group_scores_G are scratch.
template <class Real>
void select_experts(const RouterConfig& config, std::span<const Real> scores_E,
                    std::span<const Real> bias_E, std::span<Real> choice_E,
                    std::span<Real> group_scores_G, std::span<std::int32_t> expert_ids_K) {
  std::ranges::copy(scores_E, choice_E.begin());
  for (std::size_t j = 0; j < bias_E.size(); ++j) choice_E[j] += bias_E[j];
  if (config.top_groups < config.num_groups) apply_group_limit(config, choice_E, group_scores_G);
  for (std::int32_t& id : expert_ids_K) {
    const std::size_t best = highest<Real>(choice_E);
    id = static_cast<std::int32_t>(best);
    choice_E[best] = kMasked<Real>;
  }
}

}  // namespace megamoe::detail
