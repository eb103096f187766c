// Operands of all products for one shape and row layout, and for each product how to launch and check it.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "kernels/products/products.h"
#include "sampled_reference.cuh"

namespace megamoe::testing {

/// Unit-scale operands: x, dy, dg, du about 1; weights scaled so that products are about 1.
struct ProductData {
  ProductData(int hidden_size, int intermediate_size, const std::vector<std::int32_t>& begins,
              const std::vector<std::int32_t>& counts, std::int64_t row_capacity)
      : hidden(hidden_size),
        intermediate(intermediate_size),
        num_experts(static_cast<int>(counts.size())),
        capacity(row_capacity),
        begin(num_experts),
        count(num_experts),
        x_NH(capacity * hidden),
        out_NH(capacity * hidden),
        a_NI(capacity * intermediate),
        dg_NI(capacity * intermediate),
        du_NI(capacity * intermediate),
        g_NI(capacity * intermediate),
        u_NI(capacity * intermediate),
        out_NI(capacity * intermediate),
        gate_eIH(std::int64_t{num_experts} * hidden * intermediate),
        up_eIH(gate_eIH.size()),
        down_eHI(gate_eIH.size()) {
    begin.upload(begins);
    count.upload(counts);
    fill_random(x_NH, 1, 1.0F);
    fill_random(a_NI, 2, 1.0F);
    fill_random(dg_NI, 3, 1.0F);
    fill_random(du_NI, 4, 1.0F);
    fill_random(gate_eIH, 5, 1.0F / std::sqrt(static_cast<float>(hidden)));
    fill_random(up_eIH, 6, 1.0F / std::sqrt(static_cast<float>(hidden)));
    fill_random(down_eHI, 7, 1.0F / std::sqrt(static_cast<float>(intermediate)));
    poison_outputs();
  }

  void poison_outputs() {
    out_NH.poison();
    out_NI.poison();
    g_NI.poison();
    u_NI.poison();
  }

  [[nodiscard]] products::GroupedRows rows() const { return {begin.data(), count.data(), num_experts}; }
  [[nodiscard]] TensorView rows_view(const DeviceBuffer<bf16>& buffer, int columns) const {
    return tensor_view(buffer.data(), {capacity, columns});
  }
  [[nodiscard]] ConstTensorView gate() const { return tensor_view(gate_eIH.data(), {num_experts, intermediate, hidden}); }
  [[nodiscard]] ConstTensorView up() const { return tensor_view(up_eIH.data(), {num_experts, intermediate, hidden}); }
  [[nodiscard]] ConstTensorView down() const { return tensor_view(down_eHI.data(), {num_experts, hidden, intermediate}); }

  int hidden;
  int intermediate;
  int num_experts;
  std::int64_t capacity;
  DeviceBuffer<std::int32_t> begin;
  DeviceBuffer<std::int32_t> count;
  DeviceBuffer<bf16> x_NH;
  DeviceBuffer<bf16> out_NH;
  DeviceBuffer<bf16> a_NI;
  DeviceBuffer<bf16> dg_NI;
  DeviceBuffer<bf16> du_NI;
  DeviceBuffer<bf16> g_NI;
  DeviceBuffer<bf16> u_NI;
  DeviceBuffer<bf16> out_NI;
  DeviceBuffer<bf16> gate_eIH;
  DeviceBuffer<bf16> up_eIH;
  DeviceBuffer<bf16> down_eHI;
};

struct ProductCase {
  std::string name;
  std::vector<products::Sharing> sharings;
  std::function<void(ProductData&, const products::LaunchOptions&)> launch;
  /// Relative norm error over `num_samples` random outputs and every row's first column; infinite if any is not finite.
  std::function<double(ProductData&)> sampled_error;
  std::function<double(double hidden, double intermediate, double rows)> flops;
};

enum class SampledProduct { down, gate_up, dx };

struct SampleOperands {
  DotOperand rows[2];
  DotOperand weights[2];
  std::int64_t expert_stride;
  const bf16* out;
  int num_columns;
  int num_k;
};

template <SampledProduct kProduct>
__global__ void sample_errors(SampleOperands operands, const std::int32_t* begin, const std::int32_t* count, int num_experts,
                              int num_samples, ErrorSums* sums) {
  const int warp = static_cast<int>((blockIdx.x * blockDim.x + threadIdx.x) / 32);
  const int num_warps = static_cast<int>(gridDim.x * blockDim.x / 32);
  for (int sample = warp; sample < num_samples; sample += num_warps) {
    const int expert = static_cast<int>(hash(sample * 3ULL + 17) % static_cast<unsigned>(num_experts));
    if (count[expert] == 0) continue;
    const std::int64_t row = begin[expert] + hash(sample * 3ULL + 18) % static_cast<unsigned>(count[expert]);
    const int column = static_cast<int>(hash(sample * 3ULL + 19) % static_cast<unsigned>(operands.num_columns));
    double dots[2] = {0.0, 0.0};
    for (int source = 0; source < (kProduct == SampledProduct::down ? 1 : 2); ++source) {
      DotOperand weights = operands.weights[source];
      weights.data += expert * operands.expert_stride;
      dots[source] = warp_dot(operands.rows[source], row, weights, column, operands.num_k);
    }
    double reference = dots[0] + dots[1];
    if constexpr (kProduct == SampledProduct::gate_up) {
      const double g = round_bf16(dots[0]);
      reference = g / (1.0 + exp(-g)) * round_bf16(dots[1]);
    }
    add_sample(sums, to_float(operands.out[row * operands.num_columns + column]), reference);
  }
}

template <SampledProduct kProduct>
double sampled_error(const ProductData& data, const SampleOperands& operands) {
  const DeviceBuffer<ErrorSums> sums(1);
  check_cuda(cudaMemset(sums.data(), 0, sizeof(ErrorSums)), "memset");
  sample_errors<kProduct><<<512, 256>>>(operands, data.begin.data(), data.count.data(), data.num_experts, 400000, sums.data());
  check_cuda(cudaDeviceSynchronize(), "product or its check");
  return sums.download()[0].relative();
}

inline std::vector<ProductCase> product_cases() {
  using products::LaunchOptions;
  using products::Sharing;
  const std::vector<Sharing> both = {Sharing::rows, Sharing::channels};
  const auto flops = [](double multiple) {
    return [multiple](double h, double i, double rows) { return multiple * h * i * rows; };
  };
  const auto gate_up_error = [](ProductData& d) {
    const DotOperand x{d.x_NH.data(), d.hidden, 1};
    return sampled_error<SampledProduct::gate_up>(
        d, {{x, x},
            {{d.gate_eIH.data(), d.hidden, 1}, {d.up_eIH.data(), d.hidden, 1}},
            std::int64_t{d.hidden} * d.intermediate,
            d.out_NI.data(),
            d.intermediate,
            d.hidden});
  };
  return {
      {"down", both,
       [](ProductData& d, const LaunchOptions& options) {
         multiply_down(d.rows(), d.rows_view(d.a_NI, d.intermediate), d.down(), d.rows_view(d.out_NH, d.hidden), options);
       },
       [](ProductData& d) {
         return sampled_error<SampledProduct::down>(d, {{{d.a_NI.data(), d.intermediate, 1}, {}},
                                                        {{d.down_eHI.data(), d.intermediate, 1}, {}},
                                                        std::int64_t{d.hidden} * d.intermediate,
                                                        d.out_NH.data(),
                                                        d.hidden,
                                                        d.intermediate});
       },
       flops(2.0)},
      {"gate_up", both,
       [](ProductData& d, const LaunchOptions& options) {
         multiply_gate_up(d.rows(), d.rows_view(d.x_NH, d.hidden), d.gate(), d.up(), {}, {},
                          d.rows_view(d.out_NI, d.intermediate), options);
       },
       gate_up_error, flops(4.0)},
      {"gate_up_saving", both,
       [](ProductData& d, const LaunchOptions& options) {
         multiply_gate_up(d.rows(), d.rows_view(d.x_NH, d.hidden), d.gate(), d.up(), d.rows_view(d.g_NI, d.intermediate),
                          d.rows_view(d.u_NI, d.intermediate), d.rows_view(d.out_NI, d.intermediate), options);
       },
       gate_up_error, flops(4.0)},
      {"dx", both,
       [](ProductData& d, const LaunchOptions& options) {
         multiply_dx(d.rows(), d.rows_view(d.dg_NI, d.intermediate), d.rows_view(d.du_NI, d.intermediate), d.gate(), d.up(),
                     d.rows_view(d.out_NH, d.hidden), options);
       },
       [](ProductData& d) {
         return sampled_error<SampledProduct::dx>(
             d, {{{d.dg_NI.data(), d.intermediate, 1}, {d.du_NI.data(), d.intermediate, 1}},
                 {{d.gate_eIH.data(), 1, d.hidden}, {d.up_eIH.data(), 1, d.hidden}},
                 std::int64_t{d.hidden} * d.intermediate,
                 d.out_NH.data(),
                 d.hidden,
                 d.intermediate});
       },
       flops(4.0)},
  };
}

}  // namespace megamoe::testing
