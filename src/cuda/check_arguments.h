// What the host can see wrong in tensors of a device.
#pragma once

#include "megamoe/layer.h"

namespace megamoe::cuda {

/// Each throws Error(invalid_argument) naming a tensor whose memory is not of `device`, or whose
/// rows are not aligned to 16 bytes where kernels read or write them in vectors. After
/// validate_*(): shapes and dtypes are right.
void check_forward_memory(int device, const ForwardInput& input, const ForwardOutput& output);
void check_backward_memory(int device, const BackwardInput& input, const BackwardOutput& output);

}  // namespace megamoe::cuda
