#include "kernels/products/entries.h"
#include "kernels/weight_gradients/kernel.cuh"

namespace megamoe::products {

const void* weight_gradient_fp32_in_fours() {
  return reinterpret_cast<const void*>(
      &weight_gradient_kernel<GradientShared::both, GradientType::fp32>);
}

}  // namespace megamoe::products
