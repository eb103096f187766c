#include "kernels/products/entries.h"
#include "kernels/products/row_product_kernel.cuh"

namespace megamoe::products {

const void* down_sharing_channels() {
  return reinterpret_cast<const void*>(&row_product_kernel<RowProduct::down, Shared::channels>);
}

}  // namespace megamoe::products
