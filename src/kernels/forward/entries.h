// The overlapping kernels as the launch code sees them: one function a translation unit.
#pragma once

#include <cstddef>

#include "kernels/products/row_product.h"
#include "kernels/weight_gradients/weight_gradient.h"

namespace megamoe::products {

const void* gate_up_and_pull_sharing_rows();
const void* gate_up_and_pull_sharing_channels();
const void* gate_up_saving_and_pull_sharing_rows();
const void* gate_up_saving_and_pull_sharing_channels();
const void* down_and_push_sharing_rows();
const void* down_and_push_sharing_channels();
const void* dx_and_push_sharing_rows();
const void* dx_and_push_sharing_channels();

const void* gate_up_gradient_and_pull_sharing_rows();
const void* gate_up_gradient_and_pull_sharing_channels();

const void* weight_gradients_beside_rows_bf16_sharing_rows();
const void* weight_gradients_beside_rows_bf16_sharing_channels();
const void* weight_gradients_beside_rows_fp32_in_pairs();
const void* weight_gradients_beside_rows_fp32_in_fours();

/// Other activations than SwiGLU, in units that CMake writes: as row_product_with().
template <RowProduct kProduct, class Activation>
const void* gate_up_and_pull_with();
template <class Activation>
const void* gate_up_gradient_and_pull_with();

/// Dynamic shared memory of the kernels that pull, of those that push, and of the weight gradients.
std::size_t pull_shared_bytes();
std::size_t gradient_pull_shared_bytes();
std::size_t push_shared_bytes();
std::size_t rows_beside_shared_bytes(GradientType type);

}  // namespace megamoe::products
