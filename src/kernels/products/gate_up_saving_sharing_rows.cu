#include "kernels/products/entries.h"
#include "kernels/products/row_product_kernel.cuh"

namespace megamoe::products {

const void* gate_up_saving_sharing_rows() {
  return reinterpret_cast<const void*>(
      &row_product_kernel<RowProduct::gate_up_saving, Shared::rows, SwiGlu>);
}

}  // namespace megamoe::products
