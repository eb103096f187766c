// The dense bf16 product that layers are measured against.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>

#include "common/cublas_library.h"

namespace megamoe::bench {

class DenseProduct {
 public:
  explicit DenseProduct(cudaStream_t stream);

  /// False where cuBLAS cannot be loaded.
  [[nodiscard]] bool is_available() const { return cublas_ != nullptr; }
  /// c = a b, all [size, size] bf16 on the current device, fp32 sums.
  void multiply(std::int64_t size, const void* a, const void* b, void* c) const;

 private:
  std::unique_ptr<tools::Cublas> cublas_;
};

}  // namespace megamoe::bench
