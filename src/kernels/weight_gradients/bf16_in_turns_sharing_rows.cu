#include "kernels/products/entries.h"
#include "kernels/weight_gradients/kernel.cuh"

namespace megamoe::products {

const void* weight_gradient_bf16_in_turns_sharing_rows() {
  return reinterpret_cast<const void*>(
      &weight_gradient_kernel<Shared::rows, GradientType::bf16_in_turns>);
}

}  // namespace megamoe::products
