// The sizes that the GPU backend's kernels take.
#pragma once

#include "comm/workspace_layout.h"

namespace megamoe {

/// Throws Error(unsupported) naming the member of LayerConfig, its value and what is taken.
void check_gpu_limits(const WorkspaceDims& dims);

}  // namespace megamoe
