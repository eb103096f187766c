// A kernel that holds multiprocessors for as long as a test wants.
#pragma once

#include <cuda_runtime_api.h>

namespace megamoe::verify {

/// Enqueues on `stream` a kernel of `count` blocks, each of which takes a multiprocessor's whole
/// shared memory, until `*release` (pinned host memory) is not 0.
cudaError_t hold_multiprocessors(int count, const int* release, cudaStream_t stream);

}  // namespace megamoe::verify
