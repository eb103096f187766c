// fp64 reference of the products at given (row, column) samples: one warp a sample.
#pragma once

#include <cmath>

#include "base/activation.h"
#include "device_buffers.cuh"

namespace megamoe::testing {

/// A bf16 matrix seen as (index, k): element data[index * index_stride + k * k_stride].
struct DotOperand {
  const bf16* data;
  std::int64_t index_stride;
  std::int64_t k_stride;
};

/// sum over k of a[i, k] * b[j, k] in fp64, by the whole warp.
__device__ inline double warp_dot(const DotOperand& a, std::int64_t i, const DotOperand& b,
                                  std::int64_t j, int num_k) {
  double sum = 0.0;
  for (int k = static_cast<int>(threadIdx.x) % 32; k < num_k; k += 32) {
    sum += static_cast<double>(to_float(a.data[i * a.index_stride + k * a.k_stride])) *
           static_cast<double>(to_float(b.data[j * b.index_stride + k * b.k_stride]));
  }
  for (int distance = 16; distance > 0; distance /= 2)
    sum += __shfl_xor_sync(0xffffffffU, sum, distance);
  return sum;
}

__device__ inline double round_bf16(double value) {
  return to_float(to_bf16(static_cast<float>(value)));
}

/// Sums over samples of squared error and squared reference, the largest error, and how many
/// outputs are not finite.
struct ErrorSums {
  double squared_error = 0.0;
  double squared_reference = 0.0;
  double max_error = 0.0;
  unsigned long long num_bad = 0;

  [[nodiscard]] double relative() const {
    return num_bad > 0 ? INFINITY : std::sqrt(squared_error / squared_reference);
  }
};

__device__ inline void add_sample(ErrorSums* sums, double value, double reference) {
  if (threadIdx.x % 32 != 0) return;
  if (!isfinite(value)) {
    atomicAdd(&sums->num_bad, 1ULL);
    return;
  }
  const double error = value - reference;
  atomicAdd(&sums->squared_error, error * error);
  atomicAdd(&sums->squared_reference, reference * reference);
  atomicMax(reinterpret_cast<unsigned long long*>(&sums->max_error),
            static_cast<unsigned long long>(__double_as_longlong(fabs(error))));
}

}  // namespace megamoe::testing
