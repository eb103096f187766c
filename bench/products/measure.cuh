// Timing on the device: medians over repetitions with events, beside the dense ceiling of the same
// run.
#pragma once

#include <cublas_v2.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <thread>
#include <vector>

#include "gpu/device_buffers.cuh"

namespace megamoe::bench {

struct Timing {
  double median_ms = 0.0;
  double min_ms = 0.0;
  double max_ms = 0.0;
};

inline Timing time_on_device(const std::function<void()>& launch, int num_warmups,
                             int num_repetitions) {
  std::vector<cudaEvent_t> events(static_cast<std::size_t>(num_repetitions) + 1);
  for (cudaEvent_t& event : events) testing::check_cuda(cudaEventCreate(&event), "cudaEventCreate");
  for (int i = 0; i < num_warmups; ++i) launch();
  testing::check_cuda(cudaEventRecord(events[0]), "cudaEventRecord");
  for (int i = 0; i < num_repetitions; ++i) {
    launch();
    testing::check_cuda(cudaEventRecord(events[static_cast<std::size_t>(i) + 1]),
                        "cudaEventRecord");
  }
  testing::check_cuda(cudaDeviceSynchronize(), "timed launches");
  std::vector<float> ms(static_cast<std::size_t>(num_repetitions));
  for (std::size_t i = 0; i < ms.size(); ++i)
    cudaEventElapsedTime(&ms[i], events[i], events[i + 1]);
  for (cudaEvent_t event : events) cudaEventDestroy(event);
  std::sort(ms.begin(), ms.end());
  return {ms[ms.size() / 2], ms.front(), ms.back()};
}

/// The chip lowers its clock within tens of milliseconds of full load, so everything that is to be
/// compared runs in bursts of the same length from the same state: a pause, then about 40 ms of
/// launches.
inline Timing time_burst(const std::function<void()>& launch) {
  constexpr double kBurstMs = 40.0;
  const double once_ms = time_on_device(launch, 1, 1).median_ms;
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  return time_on_device(launch, 2, std::clamp(static_cast<int>(kBurstMs / once_ms), 7, 25));
}

/// P: TFLOP/s of an 8192^3 bf16 product of random data through cuBLAS.
inline double dense_tflops() {
  constexpr int kSize = 8192;
  const testing::DeviceBuffer<bf16> a(std::int64_t{kSize} * kSize);
  const testing::DeviceBuffer<bf16> b(std::int64_t{kSize} * kSize);
  const testing::DeviceBuffer<bf16> c(std::int64_t{kSize} * kSize);
  testing::fill_random(a, 101, 1.0F);
  testing::fill_random(b, 102, 1.0F);
  cublasHandle_t handle = nullptr;
  if (cublasCreate(&handle) != CUBLAS_STATUS_SUCCESS)
    throw std::runtime_error("cublasCreate failed");
  const float one = 1.0F;
  const float zero = 0.0F;
  const Timing timing = time_burst([&] {
    cublasGemmEx(handle, CUBLAS_OP_T, CUBLAS_OP_N, kSize, kSize, kSize, &one, a.data(), CUDA_R_16BF,
                 kSize, b.data(), CUDA_R_16BF, kSize, &zero, c.data(), CUDA_R_16BF, kSize,
                 CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
  });
  cublasDestroy(handle);
  return 2.0 * kSize * kSize * kSize / timing.median_ms / 1e9;
}

/// Bytes a second, in TB/s, of a copy within the device's memory: those read and those written.
inline double copy_tb_per_s() {
  constexpr std::int64_t kBytes = std::int64_t{2} << 30;
  const testing::DeviceBuffer<std::uint8_t> from(kBytes);
  const testing::DeviceBuffer<std::uint8_t> to(kBytes);
  const Timing timing = time_burst([&] {
    testing::check_cuda(
        cudaMemcpyAsync(to.data(), from.data(), kBytes, cudaMemcpyDeviceToDevice, nullptr),
        "device copy");
  });
  return 2.0 * kBytes / timing.median_ms / 1e9;
}

}  // namespace megamoe::bench
