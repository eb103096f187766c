#include "kernels/forward/entries.h"
#include "kernels/forward/product_and_push_kernel.cuh"

namespace megamoe::products {

const void* down_and_push_sharing_rows() {
  return reinterpret_cast<const void*>(&product_and_push_kernel<RowProduct::down, Shared::rows>);
}

std::size_t push_shared_bytes() { return kSharedBytesWith<SharedStorage, PushShared>; }

}  // namespace megamoe::products
