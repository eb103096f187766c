// What the launch of a row product needs, once its arguments are checked: for the products that
// store their rows and for those that push them (kernels/forward/).
#pragma once

#include "kernels/products/products.h"
#include "kernels/products/row_product.h"

namespace megamoe::products {

struct RowProductLaunch {
  RowProductParams params{};
  Sharing sharing = Sharing::rows;  ///< never automatic
};

/// Without the map of o.
RowProductLaunch describe_down(const GroupedRows& rows, const ConstTensorView& a_NI,
                               const ConstTensorView& down_eHI, const LaunchOptions& options);
/// With all maps.
RowProductLaunch describe_gate_up(const GroupedRows& rows, const Activation& activation,
                                  const ConstTensorView& x_NH, const ConstTensorView& gate_eIH,
                                  const ConstTensorView& up_eIH, const TensorView& g_NI,
                                  const TensorView& u_NI, const TensorView& a_NI,
                                  const LaunchOptions& options);
/// Without the map of dx.
RowProductLaunch describe_dx(const GroupedRows& rows, const ConstTensorView& dg_NI,
                             const ConstTensorView& du_NI, const ConstTensorView& gate_eIH,
                             const ConstTensorView& up_eIH, const LaunchOptions& options);

}  // namespace megamoe::products
