#include "kernels/products/entries.h"
#include "kernels/weight_gradients/kernel.cuh"

#ifdef FP_C4
#define FP_SHARED Shared::both
#else
#define FP_SHARED Shared::rows
#endif
namespace megamoe::products {

const void* weight_gradient_fp32_sharing_rows() {
  return reinterpret_cast<const void*>(&weight_gradient_kernel<FP_SHARED, GradientType::fp32>);
}

}  // namespace megamoe::products
