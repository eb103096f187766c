#include "base/activation.h"
#include "kernels/gate_up_gradient/kernel.cuh"
#include "kernels/products/entries.h"

namespace megamoe::products {

const void* gate_up_gradient_sharing_channels() {
  return reinterpret_cast<const void*>(&gate_up_gradient_kernel<Shared::channels, SwiGlu>);
}

}  // namespace megamoe::products
