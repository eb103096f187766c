// A dense bf16 product through cuBLAS, which is loaded when it is first needed: only benchmarks
// want it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace megamoe::bench {

class DenseProduct {
 public:
  explicit DenseProduct(cudaStream_t stream);
  DenseProduct(const DenseProduct&) = delete;
  DenseProduct& operator=(const DenseProduct&) = delete;
  ~DenseProduct();

  [[nodiscard]] bool is_available() const { return handle_ != nullptr; }
  /// c = a b, all [size, size] bf16 on the current device, fp32 sums.
  void multiply(std::int64_t size, const void* a, const void* b, void* c) const;

 private:
  void* handle_ = nullptr;
};

}  // namespace megamoe::bench
