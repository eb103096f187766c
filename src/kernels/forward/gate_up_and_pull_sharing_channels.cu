#include "kernels/forward/entries.h"
#include "kernels/forward/gate_up_and_pull_kernel.cuh"

namespace megamoe::products {

const void* gate_up_and_pull_sharing_channels() {
  return reinterpret_cast<const void*>(
      &gate_up_and_pull_kernel<RowProduct::gate_up, Shared::channels, SwiGlu>);
}

}  // namespace megamoe::products
