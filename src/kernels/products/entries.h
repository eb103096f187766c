// The kernels of the products as the launch code sees them: one function a translation unit, so
// that each compiles on its own.
#pragma once

#include "kernels/products/row_product.h"

namespace megamoe::products {

// SwiGLU, and what has no activation: both ways of sharing.

const void* down_sharing_rows();
const void* down_sharing_channels();
const void* gate_up_sharing_rows();
const void* gate_up_sharing_channels();
const void* gate_up_saving_sharing_rows();
const void* gate_up_saving_sharing_channels();
const void* dx_sharing_rows();
const void* dx_sharing_channels();

const void* weight_gradient_bf16_sharing_rows();
const void* weight_gradient_bf16_sharing_channels();
const void* weight_gradient_fp32_in_pairs();
const void* weight_gradient_fp32_in_fours();
const void* gate_up_gradient_sharing_rows();
const void* gate_up_gradient_sharing_channels();

// Other activations share channels only. Instantiated in units that CMake writes from *.cu.in, one
// for each product and activation.
template <RowProduct kProduct, class Activation>
const void* row_product_with();
template <class Activation>
const void* gate_up_gradient_with();

}  // namespace megamoe::products
