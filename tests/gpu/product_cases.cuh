// Every product: how to launch it, to check it, and what it has to do.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "product_data.cuh"
#include "product_errors.cuh"

namespace megamoe::testing {

/// What a product has to do, its epilogue included, at N rows, e experts, H and I. Every operand
/// and every result crosses memory once. Left out: the rows' weights and dw's sums of p, 4 bytes
/// for 64 channels.
struct ProductWork {
  double products;           ///< of N x H x I multiplications and additions
  double rows_hidden;        ///< bf16 matrices [N, H] read or written
  double rows_intermediate;  ///< bf16 matrices [N, I] read or written
  double weight_bytes;       ///< for each of e x H x I

  [[nodiscard]] double flops(double rows, double hidden, double intermediate) const {
    return 2.0 * products * rows * hidden * intermediate;
  }
  [[nodiscard]] double bytes(double rows, double experts, double hidden,
                             double intermediate) const {
    return 2.0 * rows * (rows_hidden * hidden + rows_intermediate * intermediate) +
           weight_bytes * experts * hidden * intermediate;
  }
};

struct ProductCase {
  std::string name;
  double tolerance;  ///< on sampled_error
  std::vector<products::Sharing> sharings;
  std::function<void(ProductData&, const products::LaunchOptions&)> launch;
  /// Relative norm error over `num_samples` random outputs and every row's first column; infinite
  /// if any is not finite.
  std::function<double(ProductData&)> sampled_error;
  ProductWork work;
};

/// As the layer launches them: tiles from a counter.
inline void launch_gradients(ProductData& d, const std::vector<products::WeightGradient>& jobs,
                             products::GradientMode mode, const products::LaunchOptions& options) {
  multiply_weight_gradients(d.rows(), jobs, mode, options, nullptr, d.num_tiles_taken.data());
}

inline std::vector<ProductCase> product_cases() {
  using products::LaunchOptions;
  using products::Sharing;
  const std::vector<Sharing> all = {Sharing::rows, Sharing::channels, Sharing::automatic};
  const auto gate_up_error = [](ProductData& d) {
    const DotOperand x{d.x_NH.data(), d.hidden, 1};
    return sampled_error<SampledProduct::gate_up>(
        d, {d.activation,
            d.gated() ? 0 : 1,
            {x, x},
            {{d.gate_eIH.data(), d.hidden, 1}, {d.up_eIH.data(), d.hidden, 1}},
            std::int64_t{d.hidden} * d.intermediate,
            d.out_NI.data(),
            d.intermediate,
            d.hidden});
  };
  return {
      {"down",
       kBf16Tolerance,
       all,
       [](ProductData& d, const LaunchOptions& options) {
         multiply_down(d.rows(), d.rows_view(d.a_NI, d.intermediate), d.down(),
                       d.rows_view(d.out_NH, d.hidden), options);
       },
       [](ProductData& d) {
         return sampled_error<SampledProduct::down>(d,
                                                    {d.activation,
                                                     0,
                                                     {{d.a_NI.data(), d.intermediate, 1}, {}},
                                                     {{d.down_eHI.data(), d.intermediate, 1}, {}},
                                                     std::int64_t{d.hidden} * d.intermediate,
                                                     d.out_NH.data(),
                                                     d.hidden,
                                                     d.intermediate});
       },
       {1, 1, 1, 2}},
      {"gate_up",
       kBf16Tolerance,
       all,
       [](ProductData& d, const LaunchOptions& options) {
         multiply_gate_up(d.rows(), d.activation, d.rows_view(d.x_NH, d.hidden), d.gate(), d.up(),
                          {}, {}, d.rows_view(d.out_NI, d.intermediate), options);
       },
       gate_up_error,
       {2, 1, 1, 4}},
      {"gate_up_saving",
       kBf16Tolerance,
       all,
       [](ProductData& d, const LaunchOptions& options) {
         multiply_gate_up(d.rows(), d.activation, d.rows_view(d.x_NH, d.hidden), d.gate(), d.up(),
                          d.gate_rows_view(d.g_NI), d.rows_view(d.u_NI, d.intermediate),
                          d.rows_view(d.out_NI, d.intermediate), options);
       },
       gate_up_error,
       {2, 1, 3, 4}},
      {"dx",
       kBf16Tolerance,
       all,
       [](ProductData& d, const LaunchOptions& options) {
         multiply_dx(d.rows(), d.gate_rows_view(d.dg_NI), d.rows_view(d.du_NI, d.intermediate),
                     d.gate(), d.up(), d.rows_view(d.out_NH, d.hidden), options);
       },
       [](ProductData& d) {
         return sampled_error<SampledProduct::dx>(
             d, {d.activation,
                 d.gated() ? 0 : 1,
                 {{d.dg_NI.data(), d.intermediate, 1}, {d.du_NI.data(), d.intermediate, 1}},
                 {{d.gate_eIH.data(), 1, d.hidden}, {d.up_eIH.data(), 1, d.hidden}},
                 std::int64_t{d.hidden} * d.intermediate,
                 d.out_NH.data(),
                 d.hidden,
                 d.intermediate});
       },
       {2, 1, 2, 4}},
      {"p",
       kBf16Tolerance,
       all,
       [](ProductData& d, const LaunchOptions& options) {
         // g is a_NI and u a buffer of its own, so that outputs can be poisoned.
         multiply_gate_up_gradient(
             d.rows(), d.activation, d.rows_view(d.dy_NH, d.hidden), d.down(),
             d.gate_rows_view(d.a_NI), d.rows_view(d.du_NI, d.intermediate), d.row_weights.data(),
             {d.gate_rows_view(d.dg_out_NI), d.rows_view(d.du_out_NI, d.intermediate),
              d.rows_view(d.out_NI, d.intermediate), d.dw_segments.data()},
             options);
       },
       [](ProductData& d) { return sampled_gate_up_gradient_error(d); },
       {1, 1, 5, 2}},
      {"dw_bf16",
       kBf16Tolerance,
       all,
       [](ProductData& d, const LaunchOptions& options) {
         launch_gradients(d, d.gradient_jobs(), products::GradientMode::store, options);
       },
       [](ProductData& d) { return sampled_gradient_error(d, d.gradients.data(), 0.0); },
       {3, 2, 3, 6}},
      {"dw_fp32",
       kFp32Tolerance,
       all,
       [](ProductData& d, const LaunchOptions& options) {
         launch_gradients(d, d.gradient_jobs(d.main_gradients()), products::GradientMode::store,
                          options);
       },
       [](ProductData& d) { return sampled_gradient_error(d, d.main_gradients(), 0.0); },
       {3, 2, 3, 12}},
      {"dw_fp32_add",
       kFp32Tolerance,
       all,
       [](ProductData& d, const LaunchOptions& options) {
         launch_gradients(d, d.gradient_jobs(d.main_gradients()),
                          products::GradientMode::accumulate, options);
       },
       [](ProductData& d) { return sampled_gradient_error(d, d.main_gradients(), 3.0); },
       {3, 2, 3, 24}},
  };
}

}  // namespace megamoe::testing
