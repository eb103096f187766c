// How far products are from fp64, sampled, and how far they may be.
#pragma once

#include <algorithm>

#include "product_data.cuh"
#include "sampled_reference.cuh"

namespace megamoe::testing {

/// Twice the relative norm error, 1.66e-3, that rounding the exact result to bf16 gives.
inline constexpr double kBf16Tolerance = 2 * 1.66e-3;
/// fp32 sums: 4 * (K / 16) * 2^-24 at K of about 1100, the longest expert of the shapes measured.
inline constexpr double kFp32Tolerance = 4 * 69 * 0x1p-24;
/// dw sums p times a rounded a; where the special function unit's last bits move a to the other
/// neighbour, a term changes by 2^-8.
inline constexpr double kDwTolerance = 2e-4;

enum class SampledProduct { down, gate_up, dx };

struct SampleOperands {
  Activation activation;
  int first_source;  ///< 1 where there is no gate
  DotOperand rows[2];
  DotOperand weights[2];
  std::int64_t expert_stride;
  const bf16* out;
  int num_columns;
  int num_k;
};

struct SampledRow {
  int expert;
  std::int64_t row;  ///< -1 where the expert has none
};

/// The row of the sample with this number.
__device__ inline SampledRow sample_row(int sample, const std::int32_t* begin,
                                        const std::int32_t* count, int num_experts) {
  const int expert =
      static_cast<int>(hash(sample * 3ULL + 17) % static_cast<unsigned>(num_experts));
  if (count[expert] == 0) return {expert, -1};
  return {expert, begin[expert] + static_cast<std::int64_t>(hash(sample * 3ULL + 18) %
                                                            static_cast<unsigned>(count[expert]))};
}

template <SampledProduct kProduct>
__global__ void sample_errors(SampleOperands operands, const std::int32_t* begin,
                              const std::int32_t* count, int num_experts, int num_samples,
                              ErrorSums* sums) {
  const int warp = static_cast<int>((blockIdx.x * blockDim.x + threadIdx.x) / 32);
  const int num_warps = static_cast<int>(gridDim.x * blockDim.x / 32);
  for (int sample = warp; sample < num_samples; sample += num_warps) {
    const auto [expert, row] = sample_row(sample, begin, count, num_experts);
    if (row < 0) continue;
    const int column =
        static_cast<int>(hash(sample * 3ULL + 19) % static_cast<unsigned>(operands.num_columns));
    double dots[2] = {0.0, 0.0};
    for (int source = operands.first_source; source < (kProduct == SampledProduct::down ? 1 : 2);
         ++source) {
      DotOperand weights = operands.weights[source];
      weights.data += expert * operands.expert_stride;
      dots[source] = warp_dot(operands.rows[source], row, weights, column, operands.num_k);
    }
    double reference = dots[0] + dots[1];
    if constexpr (kProduct == SampledProduct::gate_up) {
      reference =
          activation_reference(operands.activation, round_bf16(dots[0]), round_bf16(dots[1])).a;
    }
    add_sample(sums, to_float(operands.out[row * operands.num_columns + column]), reference);
  }
}

template <SampledProduct kProduct>
double sampled_error(const ProductData& data, const SampleOperands& operands) {
  const DeviceBuffer<ErrorSums> sums(1);
  check_cuda(cudaMemset(sums.data(), 0, sizeof(ErrorSums)), "memset");
  sample_errors<kProduct><<<512, 256>>>(operands, data.begin.data(), data.count.data(),
                                        data.num_experts, 400000, sums.data());
  check_cuda(cudaDeviceSynchronize(), "product or its check");
  return sums.download()[0].relative();
}

template <class T>
struct GradientSamples {
  DotOperand lines[3];  ///< index is the column, k the row
  DotOperand channels[3];
  const T* gradients;  ///< three of [e, num_lines, num_channels]
  int num_lines[3];
  int num_channels[3];
  double offset;  ///< what the gradient held before
  int first_job;  ///< 1 where there is no gate
};

template <class T>
__global__ void sample_gradient_errors(GradientSamples<T> samples, const std::int32_t* begin,
                                       const std::int32_t* count, int num_experts, int num_samples,
                                       ErrorSums* sums) {
  const int warp = static_cast<int>((blockIdx.x * blockDim.x + threadIdx.x) / 32);
  const int num_warps = static_cast<int>(gridDim.x * blockDim.x / 32);
  for (int sample = warp; sample < num_samples; sample += num_warps) {
    const int job = samples.first_job + sample % (3 - samples.first_job);
    const int expert =
        static_cast<int>(hash(sample * 3ULL + 17) % static_cast<unsigned>(num_experts));
    const std::int64_t line =
        hash(sample * 3ULL + 18) % static_cast<unsigned>(samples.num_lines[job]);
    const std::int64_t channel =
        hash(sample * 3ULL + 19) % static_cast<unsigned>(samples.num_channels[job]);
    DotOperand lines = samples.lines[job];
    DotOperand channels = samples.channels[job];
    lines.data += begin[expert] * lines.k_stride;
    channels.data += begin[expert] * channels.k_stride;
    const double reference =
        samples.offset + warp_dot(lines, line, channels, channel, count[expert]);
    const std::int64_t size =
        std::int64_t{num_experts} * samples.num_lines[job] * samples.num_channels[job];
    const T* gradient = samples.gradients + job * size;
    const std::int64_t at =
        (std::int64_t{expert} * samples.num_lines[job] + line) * samples.num_channels[job] +
        channel;
    double value = 0.0;
    if constexpr (sizeof(T) == 2) {
      value = to_float(gradient[at]);
    } else {
      value = gradient[at];
    }
    add_sample(sums, value, reference);
  }
}

template <class T>
double sampled_gradient_error(const ProductData& d, const T* gradients, double offset) {
  const GradientSamples<T> samples{{{d.dg_NI.data(), 1, d.intermediate},
                                    {d.du_NI.data(), 1, d.intermediate},
                                    {d.dy_NH.data(), 1, d.hidden}},
                                   {{d.x_NH.data(), 1, d.hidden},
                                    {d.x_NH.data(), 1, d.hidden},
                                    {d.a_NI.data(), 1, d.intermediate}},
                                   gradients,
                                   {d.intermediate, d.intermediate, d.hidden},
                                   {d.hidden, d.hidden, d.intermediate},
                                   offset,
                                   d.gated() ? 0 : 1};
  const DeviceBuffer<ErrorSums> sums(1);
  check_cuda(cudaMemset(sums.data(), 0, sizeof(ErrorSums)), "memset");
  sample_gradient_errors<<<512, 256>>>(samples, d.begin.data(), d.count.data(), d.num_experts,
                                       400000, sums.data());
  check_cuda(cudaDeviceSynchronize(), "product or its check");
  return sums.download()[0].relative();
}

/// dg, du and w a together, the largest of their relative errors; infinite if the partial dw is
/// off.
__global__ void sample_gate_up_gradient_errors(Activation activation, DotOperand dy,
                                               DotOperand down, std::int64_t expert_stride,
                                               const bf16* g, const bf16* u, const bf16* dg,
                                               const bf16* du, const bf16* wa,
                                               const float* row_weights, const float* dw_segments,
                                               std::int64_t capacity, int intermediate, int hidden,
                                               const std::int32_t* begin, const std::int32_t* count,
                                               int num_experts, int num_samples, ErrorSums* sums) {
  const int warp = static_cast<int>((blockIdx.x * blockDim.x + threadIdx.x) / 32);
  const int num_warps = static_cast<int>(gridDim.x * blockDim.x / 32);
  for (int sample = warp; sample < num_samples; sample += num_warps) {
    const auto [expert, row] = sample_row(sample, begin, count, num_experts);
    if (row < 0) continue;
    DotOperand weights = down;
    weights.data += expert * expert_stride;
    const double w = row_weights[row];
    // Every 64th sample checks a whole segment's dw, the others one channel.
    const int channel =
        static_cast<int>(hash(sample * 3ULL + 19) % static_cast<unsigned>(intermediate));
    const bool whole_segment = sample % 64 == 0;
    const int first = whole_segment ? channel / 64 * 64 : channel;
    double dw = 0.0;
    for (int c = first; c < (whole_segment ? first + 64 : first + 1); ++c) {
      const std::int64_t at = row * intermediate + c;
      const double p = warp_dot(dy, row, weights, c, hidden);
      const ActivationReference reference =
          activation_reference(activation, to_float(g[at]), to_float(u[at]));
      const double a = round_bf16(reference.a);
      dw += p * a;
      if (c != first) continue;
      if (is_gated(activation.kind)) {
        add_sample(&sums[0], to_float(dg[at]), w * p * reference.by_g);
      }
      add_sample(&sums[1], to_float(du[at]), w * p * reference.by_u);
      add_sample(&sums[2], to_float(wa[at]), w * a);
    }
    if (whole_segment) add_sample(&sums[3], dw_segments[channel / 64 * capacity + row], dw);
  }
}

/// How many values of the pad rows, up to the next multiple of 16, are not zero.
__global__ void count_nonzero_pads(const bf16* rows, int columns, const std::int32_t* begin,
                                   const std::int32_t* count, ErrorSums* sums) {
  const int expert = static_cast<int>(blockIdx.x);
  const std::int64_t first = std::int64_t{begin[expert]} + count[expert];
  const std::int64_t end = begin[expert] + (count[expert] + 15) / 16 * 16;
  for (std::int64_t i = first * columns + threadIdx.x; i < end * columns; i += blockDim.x) {
    if (rows[i].bits != 0) atomicAdd(&sums->num_bad, 1ULL);
  }
}

inline double sampled_gate_up_gradient_error(const ProductData& d) {
  const DeviceBuffer<ErrorSums> sums(4);
  check_cuda(cudaMemset(sums.data(), 0, 4 * sizeof(ErrorSums)), "memset");
  sample_gate_up_gradient_errors<<<512, 256>>>(
      d.activation, {d.dy_NH.data(), d.hidden, 1}, {d.down_eHI.data(), 1, d.intermediate},
      std::int64_t{d.hidden} * d.intermediate, d.a_NI.data(), d.du_NI.data(), d.dg_out_NI.data(),
      d.du_out_NI.data(), d.out_NI.data(), d.row_weights.data(), d.dw_segments.data(), d.capacity,
      d.intermediate, d.hidden, d.begin.data(), d.count.data(), d.num_experts, 200000, sums.data());
  const DeviceBuffer<bf16>* outputs[3] = {&d.dg_out_NI, &d.du_out_NI, &d.out_NI};
  for (int i = d.gated() ? 0 : 1; i < 3; ++i) {
    count_nonzero_pads<<<d.num_experts, 256>>>(outputs[i]->data(), d.intermediate, d.begin.data(),
                                               d.count.data(), sums.data() + i);
  }
  check_cuda(cudaDeviceSynchronize(), "product or its check");
  const std::vector<ErrorSums> all = sums.download();
  if (!(all[3].relative() < kDwTolerance)) return INFINITY;
  return std::max({d.gated() ? all[0].relative() : 0.0, all[1].relative(), all[2].relative()});
}

}  // namespace megamoe::testing
