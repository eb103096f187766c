#include "verify/rounding_effects.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "verify/oracle_activation.h"

namespace megamoe::verify {
namespace {

double square(double value) { return value * value; }

double half_step(double value) { return bf16_step(value) / 2.0; }

/// Of numbers that are rounded one by one, each times `factor`.
RoundingEffect half_steps(const double* values, std::int64_t count, double factor = 1.0) {
  RoundingEffect effect;
  for (std::int64_t i = 0; i < count; ++i) effect.add(factor * half_step(values[i]));
  return effect;
}

/// Of `count` slots that are rounded alike, so that what each does adds up: the square of a sum is
/// at most so many times the sum of the squares.
RoundingEffect times(double count, const RoundingEffect& effect) {
  return {count * effect.squared, count * effect.largest};
}

double norm(const double* values, std::int64_t count, std::int64_t stride = 1) {
  double sum = 0.0;
  for (std::int64_t i = 0; i < count; ++i) sum += square(values[i * stride]);
  return std::sqrt(sum);
}

/// g and u may move by up to this to either side: by what fp32 adds to their sums, and by that and
/// the rounding.
struct Margins {
  double g_of_sum = 0.0;
  double u_of_sum = 0.0;
  double g = 0.0;
  double u = 0.0;
};

/// At g and u, with derivatives that a clamp takes or passes as it does `here`.
ActivationPoint on_this_side_of_clamps(const Activation& activation, double g, double u,
                                       const ActivationPoint& here) {
  if (activation.kind != ActivationKind::clamped_swiglu) return activation_point(activation, g, u);
  const double limit = activation.limit;
  ActivationPoint point =
      activation_point({ActivationKind::swiglu}, std::min(g, limit), std::clamp(u, -limit, limit));
  if (here.act_derivative == 0.0) point.act_derivative = 0.0;
  if (here.factor_derivative == 0.0) point.factor_derivative = 0.0;
  return point;
}

/// The largest change of each value where g or u move. A clamp, which looks at rounded values,
/// changes a derivative by all of its jump, but only where fp32's sum rounds to another side of it.
ActivationPoint largest_changes(const Activation& activation, double g, double u,
                                const Margins& margins) {
  const ActivationPoint here = activation_point(activation, g, u);
  ActivationPoint changes{};
  for (const double side : {-1.0, 1.0}) {
    const ActivationPoint rounded =
        on_this_side_of_clamps(activation, g + side * margins.g, u + side * margins.u, here);
    const ActivationPoint summed =
        activation_point(activation, g + side * margins.g_of_sum, u + side * margins.u_of_sum);
    for (double ActivationPoint::*value :
         {&ActivationPoint::act, &ActivationPoint::act_derivative, &ActivationPoint::factor,
          &ActivationPoint::factor_derivative}) {
      changes.*value = std::max({changes.*value, std::abs(rounded.*value - here.*value),
                                 std::abs(summed.*value - here.*value)});
    }
  }
  return changes;
}

}  // namespace

/// On the slices that one slot is part of.
struct RoundingTally::Expert::OfSlot {
  RoundingEffect y;
  RoundingEffect dx;
  RoundingEffect dweight;
  RoundingEffect dgate;
  RoundingEffect dup;
  RoundingEffect ddown;
};

double num_twins(const std::int32_t* ids_K, std::int64_t top_k, std::int32_t expert) {
  return static_cast<double>(std::count(ids_K, ids_K + top_k, expert));
}

RoundingTally::RoundingTally(const OracleInput& input, GradientStorage storage)
    : in_(input), storage_(storage), y_S_(input.num_tokens * input.top_k), dx_S_(y_S_.size()) {
  effects_.y_T.resize(input.num_tokens);
  effects_.dx_T.resize(input.num_tokens);
  effects_.dweights_TK.resize(y_S_.size());
  effects_.dgate_E.resize(input.num_experts);
  effects_.dup_E.resize(input.num_experts);
  effects_.ddown_E.resize(input.num_experts);
}

RoundingTally::Expert::Expert(RoundingTally& tally, std::int64_t expert)
    : tally_(tally), expert_(expert) {
  const OracleInput& in = tally.in_;
  const std::int64_t first = expert * in.intermediate_dim * in.hidden_dim;
  for (std::int64_t i = 0; i < in.intermediate_dim; ++i) {
    const std::int64_t row = first + i * in.hidden_dim;
    gate_I_.push_back(in.gate_EIH.empty() ? 0.0 : norm(&in.gate_EIH[row], in.hidden_dim));
    up_I_.push_back(norm(&in.up_EIH[row], in.hidden_dim));
    down_I_.push_back(norm(&in.down_EHI[first + i], in.hidden_dim, in.intermediate_dim));
  }
}

void RoundingTally::Expert::add_channel(const SlotValues& values, std::int64_t channel,
                                        OfSlot& effects) const {
  const OracleInput& in = tally_.in_;
  const double x_norm = norm(&in.x_TH[values.token * in.hidden_dim], in.hidden_dim);
  const double dy_norm = norm(&in.dy_TH[values.token * in.hidden_dim], in.hidden_dim);
  const double weight = std::abs(in.weights_TK[values.slot]);
  const double g = values.g_I[channel];
  const double u = values.u_I[channel];
  const double p = std::abs(values.p_I[channel]);
  const ActivationPoint point = activation_point(in.activation, g, u);
  const double act = std::abs(point.act);
  const double factor = std::abs(point.factor);
  const double act_derivative = std::abs(point.act_derivative);
  const double factor_derivative = std::abs(point.factor_derivative);

  const auto add = [&](const Changes& changes) {
    effects.y.add(weight * changes.a * down_I_[channel]);
    effects.dweight.add(p * changes.a);
    effects.ddown.add(weight * changes.a * dy_norm);
    effects.dgate.add(changes.dg * x_norm);
    effects.dup.add(changes.du * x_norm);
    effects.dx.add(changes.dg * gate_I_[channel] + changes.du * up_I_[channel]);
  };
  // What fp32 adds to a sum that cancels.
  const double of_sum = fp32_sum_error(in.hidden_dim);
  const double da = weight * p;
  const double g_of_sum = of_sum * gate_I_[channel] * x_norm;
  const double u_of_sum = of_sum * up_I_[channel] * x_norm;
  const ActivationPoint by_g =
      largest_changes(in.activation, g, u, {.g_of_sum = g_of_sum, .g = half_step(g) + g_of_sum});
  add({by_g.act * factor, da * factor * by_g.act_derivative, da * by_g.act * factor_derivative});
  const ActivationPoint by_u =
      largest_changes(in.activation, g, u, {.u_of_sum = u_of_sum, .u = half_step(u) + u_of_sum});
  add({act * by_u.factor, da * by_u.factor * act_derivative, da * act * by_u.factor_derivative});
  const ActivationError by_fp32 = activation_error(in.activation, g);
  add({by_fp32.act * factor, da * factor * by_fp32.act_derivative,
       da * by_fp32.act * factor_derivative});
  const double p_error = of_sum * down_I_[channel] * dy_norm;
  add({0.0, weight * p_error * factor * act_derivative,
       weight * p_error * act * factor_derivative});
  add({half_step(act * factor), 0.0, 0.0});
  add({0.0, half_step(da * factor * act_derivative), 0.0});
  add({0.0, 0.0, half_step(da * act * factor_derivative)});
  effects.ddown.add(half_step(weight * act * factor) * dy_norm);
}

void RoundingTally::Expert::add(const SlotValues& values) {
  const OracleInput& in = tally_.in_;
  OfSlot effects;
  for (std::int64_t i = 0; i < in.intermediate_dim; ++i) add_channel(values, i, effects);
  const double weight = std::abs(in.weights_TK[values.slot]);
  effects.y.add(half_steps(values.o_H, in.hidden_dim, weight));
  effects.dx.add(half_steps(values.dx_H, in.hidden_dim));
  const double twins = num_twins(&in.expert_ids_TK[values.token * in.top_k], in.top_k,
                                 in.expert_ids_TK[values.slot]);
  tally_.y_S_[values.slot] = times(twins, effects.y);
  tally_.dx_S_[values.slot] = times(twins, effects.dx);
  tally_.effects_.dweights_TK[values.slot] = effects.dweight;
  tally_.effects_.dgate_E[expert_].add(times(twins, effects.dgate));
  tally_.effects_.dup_E[expert_].add(times(twins, effects.dup));
  tally_.effects_.ddown_E[expert_].add(times(twins, effects.ddown));
}

RoundingEffects RoundingTally::effects(const OracleResult& exact) && {
  for (std::int64_t token = 0; token < in_.num_tokens; ++token) {
    for (std::int64_t slot = token * in_.top_k; slot < (token + 1) * in_.top_k; ++slot) {
      effects_.y_T[token].add(y_S_[slot]);
      effects_.dx_T[token].add(dx_S_[slot]);
    }
    const std::int64_t row = token * in_.hidden_dim;
    effects_.y_T[token].add(half_steps(&exact.y_TH[row], in_.hidden_dim));
    effects_.dx_T[token].add(half_steps(&exact.dx_TH[row], in_.hidden_dim));
  }
  if (storage_ == GradientStorage::fp32) return std::move(effects_);
  const std::int64_t size = in_.hidden_dim * in_.intermediate_dim;
  for (std::int64_t expert = 0; expert < in_.num_experts; ++expert) {
    if (!exact.dgate_EIH.empty()) {
      effects_.dgate_E[expert].add(half_steps(&exact.dgate_EIH[expert * size], size));
    }
    effects_.dup_E[expert].add(half_steps(&exact.dup_EIH[expert * size], size));
    effects_.ddown_E[expert].add(half_steps(&exact.ddown_EHI[expert * size], size));
  }
  return std::move(effects_);
}

}  // namespace megamoe::verify
