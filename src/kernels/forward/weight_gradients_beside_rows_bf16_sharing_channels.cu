#include "kernels/forward/entries.h"
#include "kernels/forward/weight_gradients_beside_rows_kernel.cuh"

namespace megamoe::products {

const void* weight_gradients_beside_rows_bf16_sharing_channels() {
  return reinterpret_cast<const void*>(
      &weight_gradients_beside_rows_kernel<GradientShared::channels, GradientType::bf16>);
}

}  // namespace megamoe::products
