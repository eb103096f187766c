#include "kernels/products/entries.h"
#include "kernels/products/row_product_kernel.cuh"

namespace megamoe::products {

const void* gate_up_sharing_channels() {
  return reinterpret_cast<const void*>(
      &row_product_kernel<RowProduct::gate_up, Shared::channels, SwiGlu>);
}

}  // namespace megamoe::products
