// The overlapping kernels as the launch code sees them: one function a translation unit.
#pragma once

#include <cstddef>

namespace megamoe::products {

const void* gate_up_and_pull_sharing_rows();
const void* gate_up_and_pull_sharing_channels();
const void* gate_up_saving_and_pull_sharing_rows();
const void* gate_up_saving_and_pull_sharing_channels();
const void* down_and_push_sharing_rows();
const void* down_and_push_sharing_channels();
const void* dx_and_push_sharing_rows();
const void* dx_and_push_sharing_channels();

/// Dynamic shared memory of the kernels that pull, and of those that push.
std::size_t pull_shared_bytes();
std::size_t push_shared_bytes();

}  // namespace megamoe::products
