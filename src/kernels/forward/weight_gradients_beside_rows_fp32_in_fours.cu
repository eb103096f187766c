#include "kernels/forward/entries.h"
#include "kernels/forward/weight_gradients_beside_rows_kernel.cuh"

namespace megamoe::products {

const void* weight_gradients_beside_rows_fp32_in_fours() {
  return reinterpret_cast<const void*>(
      &weight_gradients_beside_rows_kernel<GradientShared::both, GradientType::fp32>);
}

}  // namespace megamoe::products
