#include "routing/router_balance.h"

#include <cmath>
#include <string>

#include "base/tensor_check.h"
#include "routing/router_check.h"

namespace megamoe {

RouterLoad::RouterLoad(std::int64_t num_experts) : num_experts_(num_experts) {
  if (num_experts < 1) {
    detail::refuse("num_experts must be at least 1, got " + std::to_string(num_experts));
  }
  values_.assign(static_cast<std::size_t>(2 * num_experts + 1), 0.0);
}

std::int64_t RouterLoad::count(std::int64_t expert) const {
  return static_cast<std::int64_t>(values_[static_cast<std::size_t>(expert)]);
}

double RouterLoad::score_sum(std::int64_t expert) const {
  return values_[static_cast<std::size_t>(num_experts_ + expert)];
}

std::int64_t RouterLoad::num_tokens() const {
  return values_.empty() ? 0 : static_cast<std::int64_t>(values_.back());
}

std::int64_t RouterLoad::num_slots() const {
  std::int64_t slots = 0;
  for (std::int64_t expert = 0; expert < num_experts_; ++expert) slots += count(expert);
  return slots;
}

double RouterLoad::max_over_mean() const {
  const std::int64_t slots = num_slots();
  if (slots == 0) return 0.0;
  const double highest = *std::max_element(values_.begin(), values_.begin() + num_experts_);
  return highest * static_cast<double>(num_experts_) / static_cast<double>(slots);
}

void RouterLoad::clear() { std::ranges::fill(values_, 0.0); }

RouterLoad& RouterLoad::operator+=(const RouterLoad& other) {
  detail::check_load("other", other, num_experts_);
  for (std::size_t i = 0; i < values_.size(); ++i) values_[i] += other.values_[i];
  return *this;
}

void Router::add_load(const RouterContext& context, RouterLoad& load) const {
  detail::check_context(config_, context);
  detail::check_load("load", load, config_.num_experts);
  const auto experts = static_cast<std::size_t>(config_.num_experts);
  const std::span<double> values = load.values();
  detail::for_each_id(context.expert_ids(),
                      [&](std::int32_t id) { values[static_cast<std::size_t>(id)] += 1.0; });
  const std::span<const float> scores_TE(static_cast<const float*>(context.scores().data),
                                         static_cast<std::size_t>(context.num_tokens()) * experts);
  for (std::size_t first = 0; first < scores_TE.size(); first += experts) {
    const auto scores_E = scores_TE.subspan(first, experts);
    const float divisor = detail::probability_divisor(config_.score_function, scores_E);
    for (std::size_t j = 0; j < experts; ++j) {
      values[experts + j] += static_cast<double>(scores_E[j] / divisor);
    }
  }
  values.back() += static_cast<double>(context.num_tokens());
}

double Router::aux_loss(const RouterLoad& global_load) const {
  detail::check_load("global_load", global_load, config_.num_experts);
  const auto slots = static_cast<double>(global_load.num_slots());
  const auto tokens = static_cast<double>(global_load.num_tokens());
  if (slots == 0.0 || tokens == 0.0) return 0.0;
  double sum = 0.0;
  for (std::int64_t j = 0; j < config_.num_experts; ++j) {
    sum += static_cast<double>(global_load.count(j)) / slots * (global_load.score_sum(j) / tokens);
  }
  return static_cast<double>(config_.aux_loss_alpha) * static_cast<double>(config_.num_experts) *
         sum;
}

void update_selection_bias(const RouterLoad& global_load, float rate, TensorView selection_bias) {
  if (!std::isfinite(rate) || rate < 0.0F) {
    detail::refuse("rate must be finite and at least 0, got " + std::to_string(rate));
  }
  if (global_load.num_experts() < 1) detail::refuse("global_load has no experts");
  const std::int64_t experts = global_load.num_experts();
  detail::check_tensor("selection_bias", selection_bias, {DType::fp32}, {experts},
                       detail::Access::write);
  auto* bias_E = static_cast<float*>(selection_bias.data);
  const std::int64_t slots = global_load.num_slots();
  for (std::int64_t j = 0; j < experts; ++j) {
    // Against the mean slots / E in whole numbers, so that equal is exact.
    const std::int64_t load = global_load.count(j) * experts;
    if (load < slots) bias_E[j] += rate;
    if (load > slots) bias_E[j] -= rate;
  }
}

}  // namespace megamoe
