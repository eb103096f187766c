// Devices that can run the kernels, and tensors that lie on them.
#pragma once

#include <cuda_runtime_api.h>

#include "megamoe/tensor.h"

namespace megamoe::cuda {

/// Throws Error(invalid_argument) where there is no such device, unsupported, in words, where it
/// cannot run the kernels.
cudaDeviceProp require_device(int device);

/// Absent, or of a size 0 somewhere: its pointer says nothing.
bool has_no_elements(const ConstTensorView& tensor);

/// Throws Error(invalid_argument) naming the tensor unless it has no elements or lies on `device`
/// or in managed memory. `user` says what works there: "the layer's rank".
void check_memory(int device, const ConstTensorView& tensor, const char* name, const char* user);

}  // namespace megamoe::cuda
