// The CUDA runtime as this backend uses it: errors as exceptions, the current device, a stream and
// memory as scopes.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>
#include <string>

#include "megamoe/error.h"

namespace megamoe::trainer::cuda {

/// Throws Error (internal) naming `what`, (out_of_memory) where that is the reason.
inline void check(cudaError_t status, const std::string& what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // must not show up again at the next launch
  throw Error(status == cudaErrorMemoryAllocation ? ErrorCode::out_of_memory : ErrorCode::internal,
              what + ": " + cudaGetErrorString(status));
}

/// Makes `device` current on this thread for a scope.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device) {
    check(cudaGetDevice(&previous_), "cudaGetDevice");
    check(cudaSetDevice(device), "device " + std::to_string(device));
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;
  ~CurrentDevice() { cudaSetDevice(previous_); }

 private:
  int previous_ = 0;
};

/// A stream of the current device that waits for no other.
class OwnedStream {
 public:
  OwnedStream() {
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
  }
  OwnedStream(const OwnedStream&) = delete;
  OwnedStream& operator=(const OwnedStream&) = delete;
  ~OwnedStream() { cudaStreamDestroy(stream_); }

  [[nodiscard]] cudaStream_t get() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

/// Memory of the current device, zeroed in the order of `stream`.
inline std::shared_ptr<std::byte> allocate(std::size_t bytes, cudaStream_t stream) {
  if (bytes == 0) return nullptr;
  void* memory = nullptr;
  check(cudaMalloc(&memory, bytes),
        "device memory of " + std::to_string(bytes) + " bytes for training");
  std::shared_ptr<std::byte> owned(static_cast<std::byte*>(memory),
                                   [](std::byte* data) { cudaFree(data); });
  check(cudaMemsetAsync(memory, 0, bytes, stream), "clearing device memory");
  return owned;
}

}  // namespace megamoe::trainer::cuda
