#include "base/activation.h"
#include "kernels/forward/entries.h"
#include "kernels/forward/gradient_and_pull_kernel.cuh"

namespace megamoe::products {

const void* gate_up_gradient_and_pull_sharing_channels() {
  return reinterpret_cast<const void*>(&gate_up_gradient_and_pull_kernel<Shared::channels, SwiGlu>);
}

}  // namespace megamoe::products
