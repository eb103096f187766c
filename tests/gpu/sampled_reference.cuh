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

/// a, and its derivatives by g and u.
struct ActivationReference {
  double a;
  double by_g;
  double by_u;
};

__device__ inline ActivationReference silu_reference(double g, double u) {
  const double s = 1.0 / (1.0 + exp(-g));
  return {g * s * u, u * s * (1.0 + g * (1.0 - s)), g * s};
}

/// The formulas of include/megamoe/config.h, written anew in fp64.
__device__ inline ActivationReference activation_reference(const Activation& activation, double g,
                                                           double u) {
  constexpr double kInverseSqrtTwoPi = 0.39894228040143267794;
  switch (activation.kind) {
    case ActivationKind::clamped_swiglu: {
      const double limit = activation.limit;
      const ActivationReference inner =
          silu_reference(fmin(g, limit), fmax(-limit, fmin(u, limit)));
      return {inner.a, g > limit ? 0.0 : inner.by_g, fabs(u) > limit ? 0.0 : inner.by_u};
    }
    case ActivationKind::gelu_erf: {
      const double cdf = 0.5 * (1.0 + erf(g / sqrt(2.0)));
      return {g * cdf * u, u * (cdf + g * kInverseSqrtTwoPi * exp(-0.5 * g * g)), g * cdf};
    }
    case ActivationKind::gelu_tanh: {
      const double slope = 2.0 * kInverseSqrtTwoPi;  // sqrt(2 / pi)
      const double t = tanh(slope * (g + 0.044715 * g * g * g));
      const double by_g =
          0.5 * (1.0 + t) + 0.5 * g * (1.0 - t * t) * slope * (1.0 + 3.0 * 0.044715 * g * g);
      return {0.5 * g * (1.0 + t) * u, u * by_g, 0.5 * g * (1.0 + t)};
    }
    case ActivationKind::relu2:
      return {u > 0.0 ? u * u : 0.0, 0.0, u > 0.0 ? 2.0 * u : 0.0};
    case ActivationKind::identity:
      return {u, 0.0, 1.0};
    case ActivationKind::swiglu:
      break;
  }
  return silu_reference(g, u);
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
