#include "kernels/products/entries.h"
#include "kernels/weight_gradients/kernel.cuh"

namespace megamoe::products {

const void* weight_gradient_bf16_in_turns_sharing_channels() {
  return reinterpret_cast<const void*>(
      &weight_gradient_kernel<Shared::channels, GradientType::bf16_in_turns>);
}

}  // namespace megamoe::products
