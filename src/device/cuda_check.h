// Errors of the CUDA runtime as exceptions: for all host code, that of kernels and of the backend.
#pragma once

#include <cuda_runtime_api.h>

#include <string>
#include <string_view>

#include "megamoe/error.h"

namespace megamoe::cuda {

/// Throws Error(internal) naming `what`, out_of_memory where that is the reason.
inline void check(cudaError_t status, std::string_view what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // an error that is reported here must not show up at the next launch
  throw Error(status == cudaErrorMemoryAllocation ? ErrorCode::out_of_memory : ErrorCode::internal,
              std::string(what) + ": " + cudaGetErrorString(status));
}

}  // namespace megamoe::cuda
