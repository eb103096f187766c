// The oracle's own formulas of the activations, in fp64.
#pragma once

#include "megamoe/config.h"

namespace megamoe::verify {

/// act(g), act'(g) and the factor by which it is multiplied: a = act * factor. For ungated
/// activations act = 1 and the factor carries everything.
struct ActivationPoint {
  double act;
  double act_derivative;
  double factor;             // of u
  double factor_derivative;  // d factor / d u
};

/// ActivationKind out of range is a programming error and throws std::logic_error.
ActivationPoint activation_point(const Activation& activation, double g, double u);

/// By how much fp32 may miss act and act'. GELU's forms are 1 + erf and 1 + tanh: far below g = 0,
/// where little is left, the error stays that of a number of size 1. Others have errors relative to
/// their values: nothing beside a bf16 step.
struct ActivationError {
  double act = 0.0;
  double act_derivative = 0.0;
};
ActivationError activation_error(const Activation& activation, double g);

}  // namespace megamoe::verify
