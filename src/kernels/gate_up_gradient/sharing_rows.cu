#include "base/activation.h"
#include "kernels/gate_up_gradient/kernel.cuh"
#include "kernels/products/entries.h"

namespace megamoe::products {

const void* gate_up_gradient_sharing_rows() {
  return reinterpret_cast<const void*>(&gate_up_gradient_kernel<Shared::rows, SwiGlu>);
}

}  // namespace megamoe::products
