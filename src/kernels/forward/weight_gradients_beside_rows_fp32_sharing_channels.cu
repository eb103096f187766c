#include "kernels/forward/entries.h"
#include "kernels/forward/weight_gradients_beside_rows_kernel.cuh"

#ifdef FP_C4
#define FP_SHARED Shared::both
#else
#define FP_SHARED Shared::channels
#endif
namespace megamoe::products {

const void* weight_gradients_beside_rows_fp32_sharing_channels() {
  return reinterpret_cast<const void*>(
      &weight_gradients_beside_rows_kernel<FP_SHARED, GradientType::fp32>);
}

}  // namespace megamoe::products
