// Launching kernels from host code.
#pragma once

#include <cuda_runtime_api.h>

#include "device/cuda_check.h"

namespace megamoe::gpu {

/// Throws Error(internal) naming `what` where the last launch failed.
inline void check_launch(const char* what) { cuda::check(cudaGetLastError(), what); }

/// Multiprocessors of the current device.
inline int num_multiprocessors() {
  int device = 0;
  int count = 0;
  cuda::check(cudaGetDevice(&device), "cudaGetDevice");
  cuda::check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device),
              "multiprocessor count");
  return count;
}

/// Loads a kernel's code now. A first launch that loads code may wait for all running kernels: for
/// one that waits for a peer on the same GPU, too.
inline void load_kernel(const void* kernel) {
  cudaFuncAttributes attributes{};
  cuda::check(cudaFuncGetAttributes(&attributes, kernel), "loading a kernel");
}

}  // namespace megamoe::gpu
