// Device memory, random and poisoned contents, and fp64 reference dots for GPU tests and
// benchmarks.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "megamoe/tensor.h"

namespace megamoe::testing {

inline void check_cuda(cudaError_t status, const char* what) {
  if (status != cudaSuccess)
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

template <class T>
class DeviceBuffer {
 public:
  explicit DeviceBuffer(std::int64_t size) : size_(size) {
    check_cuda(cudaMalloc(&data_, static_cast<std::size_t>(size) * sizeof(T) + 256), "cudaMalloc");
  }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;
  ~DeviceBuffer() { cudaFree(data_); }

  [[nodiscard]] T* data() const { return data_; }
  [[nodiscard]] std::int64_t size() const { return size_; }
  void upload(const std::vector<T>& values) {
    check_cuda(cudaMemcpy(data_, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice),
               "upload");
  }
  [[nodiscard]] std::vector<T> download() const {
    std::vector<T> values(static_cast<std::size_t>(size_));
    check_cuda(cudaMemcpy(values.data(), data_, values.size() * sizeof(T), cudaMemcpyDeviceToHost),
               "download");
    return values;
  }
  /// Every byte 0xff: NaN in bf16 and fp32.
  void poison() {
    check_cuda(cudaMemset(data_, 0xff, static_cast<std::size_t>(size_) * sizeof(T)), "poison");
  }

 private:
  T* data_ = nullptr;
  std::int64_t size_;
};

__device__ __host__ inline std::uint32_t hash(std::uint64_t value) {
  value = (value ^ (value >> 31)) * 0x7fb5d329728ea185ULL;
  value = (value ^ (value >> 27)) * 0x81dadef4bc2dd44dULL;
  return static_cast<std::uint32_t>(value >> 33);
}

namespace detail {
/// About normal: the sum of four uniform values, scaled.
__global__ void fill_random_kernel(bf16* data, std::int64_t size, std::uint64_t seed, float scale) {
  for (std::int64_t i = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x; i < size;
       i += std::int64_t{gridDim.x} * blockDim.x) {
    float sum = -2.0F;
    for (int part = 0; part < 4; ++part) {
      sum += static_cast<float>(hash((static_cast<std::uint64_t>(i) * 4 + part) ^ (seed << 40)) &
                                0xffffffU) *
                 0x1p-24F * 1.0F +
             0.0F;
    }
    data[i] = to_bf16(sum * 1.7320508F * scale);
  }
}
__global__ void fill_constant_kernel(float* data, std::int64_t size, float value) {
  for (std::int64_t i = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x; i < size;
       i += std::int64_t{gridDim.x} * blockDim.x) {
    data[i] = value;
  }
}
}  // namespace detail

inline void fill_constant(const DeviceBuffer<float>& buffer, float value) {
  detail::fill_constant_kernel<<<1024, 256>>>(buffer.data(), buffer.size(), value);
  check_cuda(cudaGetLastError(), "fill_constant");
}

inline void fill_random(const DeviceBuffer<bf16>& buffer, std::uint64_t seed, float scale) {
  detail::fill_random_kernel<<<1024, 256>>>(buffer.data(), buffer.size(), seed, scale);
  check_cuda(cudaGetLastError(), "fill_random");
}

}  // namespace megamoe::testing
