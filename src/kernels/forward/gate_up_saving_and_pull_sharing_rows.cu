#include "kernels/forward/entries.h"
#include "kernels/forward/gate_up_and_pull_kernel.cuh"

namespace megamoe::products {

const void* gate_up_saving_and_pull_sharing_rows() {
  return reinterpret_cast<const void*>(
      &gate_up_and_pull_kernel<RowProduct::gate_up_saving, Shared::rows, SwiGlu>);
}

}  // namespace megamoe::products
