#include "kernels/forward/entries.h"
#include "kernels/forward/weight_gradients_beside_rows_kernel.cuh"

namespace megamoe::products {

const void* weight_gradients_beside_rows_bf16_sharing_rows() {
  return reinterpret_cast<const void*>(
      &weight_gradients_beside_rows_kernel<GradientShared::lines, GradientType::bf16>);
}

std::size_t rows_beside_shared_bytes(GradientType type) {
  return type == GradientType::bf16
             ? kSharedBytesWith<GradientStorage<GradientType::bf16>, RowsBesideShared>
             : kSharedBytesWith<GradientStorage<GradientType::fp32>, RowsBesideShared>;
}

}  // namespace megamoe::products
