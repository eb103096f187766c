// What the launch of p and its epilogue needs, once its arguments are checked.
#pragma once

#include "kernels/gate_up_gradient/gate_up_gradient.h"
#include "kernels/products/products.h"

namespace megamoe::products {

struct GateUpGradientLaunch {
  GateUpGradientParams params{};
  Sharing sharing = Sharing::rows;  ///< never automatic
};

GateUpGradientLaunch describe_gate_up_gradient(
    const GroupedRows& rows, const Activation& activation, const ConstTensorView& dy_NH,
    const ConstTensorView& down_eHI, const ConstTensorView& g_NI, const ConstTensorView& u_NI,
    const float* row_weights, const GateUpGradientOutputs& outputs, const LaunchOptions& options);

}  // namespace megamoe::products
