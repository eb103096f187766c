#include "kernels/weight_gradients/kernel.cuh"
#include "kernels/weight_gradients/weight_gradient_launch.h"

namespace megamoe::products {

const void* weight_gradient_fp32_sharing_both() {
  return reinterpret_cast<const void*>(&weight_gradient_kernel<GradientShared::both, GradientType::fp32>);
}

}  // namespace megamoe::products
