#include "verify/oracle_activation.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <stdexcept>

#include "verify/oracle.h"

namespace megamoe::verify {
namespace {

double logistic(double value) { return 1.0 / (1.0 + std::exp(-value)); }

ActivationPoint silu_point(double g, double u) {
  const double s = logistic(g);
  return {g * s, s + g * s * (1.0 - s), u, 1.0};
}

}  // namespace

ActivationPoint activation_point(const Activation& activation, double g, double u) {
  switch (activation.kind) {
    case ActivationKind::swiglu:
      return silu_point(g, u);
    case ActivationKind::clamped_swiglu: {
      const double limit = activation.limit;
      ActivationPoint point = silu_point(std::min(g, limit), std::clamp(u, -limit, limit));
      // The contract clamps rounded values: one that rounds to the limit passes its gradient.
      if (round_to_bf16(g) > limit) point.act_derivative = 0.0;
      if (std::abs(round_to_bf16(u)) > limit) point.factor_derivative = 0.0;
      return point;
    }
    case ActivationKind::gelu_erf: {
      const double cdf = 0.5 * std::erfc(-g / std::numbers::sqrt2);
      const double density = std::exp(-g * g / 2.0) / std::sqrt(2.0 * std::numbers::pi);
      return {g * cdf, cdf + g * density, u, 1.0};
    }
    case ActivationKind::gelu_tanh: {
      // 0.5 g (1 + tanh(z)) = g * logistic(2z), z = sqrt(2/pi) (g + 0.044715 g^3).
      const double slope = 2.0 * std::sqrt(2.0 / std::numbers::pi);
      const double s = logistic(slope * (g + 0.044715 * g * g * g));
      return {g * s, s + g * s * (1.0 - s) * slope * (1.0 + 3.0 * 0.044715 * g * g), u, 1.0};
    }
    case ActivationKind::relu2: {
      const double positive = std::max(u, 0.0);
      return {1.0, 0.0, positive * positive, 2.0 * positive};
    }
    case ActivationKind::identity:
      return {1.0, 0.0, u, 1.0};
  }
  throw std::logic_error("oracle: unknown activation");
}

ActivationError activation_error(const Activation& activation, double g) {
  if (activation.kind != ActivationKind::gelu_erf && activation.kind != ActivationKind::gelu_tanh) {
    return {};
  }
  // 0.5 (1 + t) with t off by up to two ulps next to -1, and its multiples: g, and in the
  // derivative g times the slope of tanh's argument.
  constexpr double kOfHalf = 0x1p-23;
  const double size = std::abs(g);
  return {kOfHalf * size, kOfHalf * (1.0 + size * (1.0 + size * size / 8.0))};
}

}  // namespace megamoe::verify
