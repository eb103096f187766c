#include "base/activation.h"
#include "kernels/forward/entries.h"
#include "kernels/forward/gradient_and_pull_kernel.cuh"

namespace megamoe::products {

const void* gate_up_gradient_and_pull_sharing_rows() {
  return reinterpret_cast<const void*>(&gate_up_gradient_and_pull_kernel<Shared::rows, SwiGlu>);
}

std::size_t gradient_pull_shared_bytes() {
  return kSharedBytesWith<gradient::Storage, gpu::PullShared>;
}

}  // namespace megamoe::products
