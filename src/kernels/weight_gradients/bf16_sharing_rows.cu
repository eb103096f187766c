#include "kernels/products/entries.h"
#include "kernels/weight_gradients/kernel.cuh"

namespace megamoe::products {

const void* weight_gradient_bf16_sharing_rows() {
  return reinterpret_cast<const void*>(
      &weight_gradient_kernel<GradientShared::lines, GradientType::bf16>);
}

}  // namespace megamoe::products
