// Operands of all products for one shape and row layout.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels/products/products.h"
#include "sampled_reference.cuh"

namespace megamoe::testing {

/// Unit-scale operands: x, dy, dg, du about 1; weights scaled so that products are about 1.
struct ProductData {
  ProductData(int hidden_size, int intermediate_size, const std::vector<std::int32_t>& begins,
              const std::vector<std::int32_t>& counts, std::int64_t row_capacity,
              bool with_gradients = true)
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
        down_eHI(gate_eIH.size()),
        dy_NH(capacity * hidden),
        dg_out_NI(capacity * intermediate),
        du_out_NI(capacity * intermediate),
        row_weights(capacity),
        dw_segments(capacity * (intermediate / 64)),
        gradients((with_gradients ? 3 : 0) * gate_eIH.size()),
        num_tiles_taken(1) {
    begin.upload(begins);
    count.upload(counts);
    fill_random(x_NH, 1, 1.0F);
    fill_random(a_NI, 2, 1.0F);
    fill_random(dg_NI, 3, 1.0F);
    fill_random(du_NI, 4, 1.0F);
    fill_random(gate_eIH, 5, 1.0F / std::sqrt(static_cast<float>(hidden)));
    fill_random(up_eIH, 6, 1.0F / std::sqrt(static_cast<float>(hidden)));
    fill_random(down_eHI, 7, 1.0F / std::sqrt(static_cast<float>(intermediate)));
    fill_random(dy_NH, 8, 1.0F);
    std::vector<float> weights(static_cast<std::size_t>(capacity));
    for (std::size_t row = 0; row < weights.size(); ++row)
      weights[row] = 0.05F + 0.0001F * static_cast<float>(hash(row) % 4096);
    row_weights.upload(weights);
    for (const auto& [buffer, columns] : row_operands())
      zero_pads(*buffer, columns, counts, begins);
    poison_outputs();
  }

  /// The row buffers that the weight gradients read.
  [[nodiscard]] std::vector<std::pair<const DeviceBuffer<bf16>*, int>> row_operands() const {
    return {{&x_NH, hidden},
            {&dy_NH, hidden},
            {&a_NI, intermediate},
            {&dg_NI, intermediate},
            {&du_NI, intermediate}};
  }
  void zero_pads(const DeviceBuffer<bf16>& rows, int columns,
                 const std::vector<std::int32_t>& counts,
                 const std::vector<std::int32_t>& begins) const {
    for (std::size_t expert = 0; expert < counts.size(); ++expert) {
      const std::int64_t end = begins[expert] + counts[expert];
      const std::int64_t pad = std::min<std::int64_t>((end + 63) / 64 * 64, capacity) - end;
      check_cuda(
          cudaMemset(rows.data() + end * columns, 0, static_cast<std::size_t>(pad * columns) * 2),
          "zero pads");
    }
  }

  void poison_outputs() {
    out_NH.poison();
    out_NI.poison();
    g_NI.poison();
    u_NI.poison();
    dg_out_NI.poison();
    du_out_NI.poison();
    dw_segments.poison();
    gradients.poison();
    num_tiles_taken.poison();
    if (main_grad != nullptr) reset_main_gradients();
  }

  /// d_gate if there is a gate, d_up, d_down of dg, du, a (for w a), x and dy, in `gradients`, as
  /// bf16 or as the fp32 of `main_grad`.
  [[nodiscard]] std::vector<products::WeightGradient> gradient_jobs(
      float* main_grad = nullptr) const {
    const std::int64_t size = gate_eIH.size();
    const auto out = [&](int job, int lines, int channels) {
      return main_grad == nullptr
                 ? tensor_view(gradients.data() + job * size, {num_experts, lines, channels})
                 : tensor_view(main_grad + job * size, {num_experts, lines, channels});
    };
    std::vector<products::WeightGradient> jobs;
    if (gated()) {
      jobs.push_back(
          {rows_view(dg_NI, intermediate), rows_view(x_NH, hidden), out(0, intermediate, hidden)});
    }
    jobs.push_back(
        {rows_view(du_NI, intermediate), rows_view(x_NH, hidden), out(1, intermediate, hidden)});
    jobs.push_back(
        {rows_view(dy_NH, hidden), rows_view(a_NI, intermediate), out(2, hidden, intermediate)});
    return jobs;
  }

  [[nodiscard]] products::GroupedRows rows() const {
    return {begin.data(), count.data(), num_experts};
  }
  [[nodiscard]] TensorView rows_view(const DeviceBuffer<bf16>& buffer, int columns) const {
    return tensor_view(buffer.data(), {capacity, columns});
  }
  [[nodiscard]] bool gated() const { return is_gated(activation.kind); }
  /// A row operand that only exists where there is a gate.
  [[nodiscard]] TensorView gate_rows_view(const DeviceBuffer<bf16>& buffer) const {
    return gated() ? rows_view(buffer, intermediate) : TensorView{};
  }
  [[nodiscard]] ConstTensorView gate() const {
    if (!gated()) return {};
    return tensor_view(gate_eIH.data(), {num_experts, intermediate, hidden});
  }
  [[nodiscard]] ConstTensorView up() const {
    return tensor_view(up_eIH.data(), {num_experts, intermediate, hidden});
  }
  [[nodiscard]] ConstTensorView down() const {
    return tensor_view(down_eHI.data(), {num_experts, hidden, intermediate});
  }

  /// fp32 gradients, every element 3 when first asked for and after reset_main_gradients().
  float* main_gradients() {
    if (main_grad == nullptr) {
      main_grad = std::make_unique<DeviceBuffer<float>>(3 * gate_eIH.size());
      reset_main_gradients();
    }
    return main_grad->data();
  }
  void reset_main_gradients() { fill_constant(*main_grad, 3.0F); }

  Activation activation;  ///< SwiGLU until a test changes it
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
  DeviceBuffer<bf16> dy_NH;
  DeviceBuffer<bf16> dg_out_NI;
  DeviceBuffer<bf16> du_out_NI;
  DeviceBuffer<float> row_weights;
  DeviceBuffer<float> dw_segments;
  DeviceBuffer<bf16> gradients;
  DeviceBuffer<std::uint32_t> num_tiles_taken;
  std::unique_ptr<DeviceBuffer<float>> main_grad;  ///< allocated by the first product that needs it
};

}  // namespace megamoe::testing
