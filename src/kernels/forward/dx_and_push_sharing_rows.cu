#include "kernels/forward/entries.h"
#include "kernels/forward/product_and_push_kernel.cuh"

namespace megamoe::products {

const void* dx_and_push_sharing_rows() {
  return reinterpret_cast<const void*>(&product_and_push_kernel<RowProduct::dx, Shared::rows>);
}

}  // namespace megamoe::products
