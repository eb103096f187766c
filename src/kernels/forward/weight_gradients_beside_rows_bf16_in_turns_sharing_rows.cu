#include "kernels/forward/entries.h"
#include "kernels/forward/weight_gradients_beside_rows_kernel.cuh"

namespace megamoe::products {

const void* weight_gradients_beside_rows_bf16_in_turns_sharing_rows() {
  return reinterpret_cast<const void*>(
      &weight_gradients_beside_rows_kernel<Shared::rows, GradientType::bf16_in_turns>);
}

}  // namespace megamoe::products
