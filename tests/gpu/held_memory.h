// A device whose memory is taken.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <vector>

#include "cuda/runtime.h"

namespace megamoe::verify {

/// All memory of a device but `left` bytes.
class HeldMemory {
 public:
  HeldMemory(int device, std::size_t left) {
    const cuda::CurrentDevice current(device);
    std::size_t free = 0, total = 0;
    cuda::check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    for (std::size_t bytes = free - left; bytes >= left; bytes /= 2) {
      while (cudaMalloc(&pieces_.emplace_back(), bytes) == cudaSuccess) {
      }
      pieces_.pop_back();
      cudaGetLastError();
    }
  }
  HeldMemory(const HeldMemory&) = delete;
  HeldMemory& operator=(const HeldMemory&) = delete;
  ~HeldMemory() {
    for (void* piece : pieces_) cudaFree(piece);
  }

 private:
  std::vector<void*> pieces_;
};

}  // namespace megamoe::verify
