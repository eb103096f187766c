#include "kernels/forward/entries.h"
#include "kernels/forward/gate_up_and_pull_kernel.cuh"

namespace megamoe::products {

const void* gate_up_and_pull_sharing_rows() {
  return reinterpret_cast<const void*>(
      &gate_up_and_pull_kernel<RowProduct::gate_up, Shared::rows, SwiGlu>);
}

std::size_t pull_shared_bytes() { return kSharedBytesWith<SharedStorage, gpu::PullShared>; }

}  // namespace megamoe::products
