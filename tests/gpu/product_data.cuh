// Operands of all products for one shape and row layout, and for each product how to launch and
// check it.
#pragma once

#include <algorithm>
#include <functional>
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
        gradients((with_gradients ? 3 : 0) * gate_eIH.size()) {
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
  std::unique_ptr<DeviceBuffer<float>> main_grad;  ///< allocated by the first product that needs it
};

/// Twice the relative norm error, 1.66e-3, that rounding the exact result to bf16 gives.
inline constexpr double kBf16Tolerance = 2 * 1.66e-3;
/// fp32 sums: 4 * (K / 16) * 2^-24 at K of about 1100, the longest expert of the shapes measured.
inline constexpr double kFp32Tolerance = 4 * 69 * 0x1p-24;
/// dw sums p times a rounded a; where the special function unit's last bits move a to the other
/// neighbour, a term changes by 2^-8.
inline constexpr double kDwTolerance = 2e-4;

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

template <SampledProduct kProduct>
__global__ void sample_errors(SampleOperands operands, const std::int32_t* begin,
                              const std::int32_t* count, int num_experts, int num_samples,
                              ErrorSums* sums) {
  const int warp = static_cast<int>((blockIdx.x * blockDim.x + threadIdx.x) / 32);
  const int num_warps = static_cast<int>(gridDim.x * blockDim.x / 32);
  for (int sample = warp; sample < num_samples; sample += num_warps) {
    const int expert =
        static_cast<int>(hash(sample * 3ULL + 17) % static_cast<unsigned>(num_experts));
    if (count[expert] == 0) continue;
    const std::int64_t row =
        begin[expert] + hash(sample * 3ULL + 18) % static_cast<unsigned>(count[expert]);
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
    const int expert =
        static_cast<int>(hash(sample * 3ULL + 17) % static_cast<unsigned>(num_experts));
    if (count[expert] == 0) continue;
    const std::int64_t row =
        begin[expert] + hash(sample * 3ULL + 18) % static_cast<unsigned>(count[expert]);
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

inline std::vector<ProductCase> product_cases() {
  using products::LaunchOptions;
  using products::Sharing;
  using products::Turns;
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
  const auto bf16_gradients = [&](const char* name, Turns turns) {
    return ProductCase{
        name,
        kBf16Tolerance,
        all,
        [turns](ProductData& d, LaunchOptions options) {
          options.turns = turns;
          multiply_weight_gradients(d.rows(), d.gradient_jobs(), products::GradientMode::store,
                                    options);
        },
        [](ProductData& d) { return sampled_gradient_error(d, d.gradients.data(), 0.0); },
        {3, 2, 3, 6}};
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
      bf16_gradients("dw_bf16", Turns::automatic),
      bf16_gradients("dw_bf16_together", Turns::never),
      bf16_gradients("dw_bf16_in_turns", Turns::always),
      {"dw_fp32",
       kFp32Tolerance,
       all,
       [](ProductData& d, const LaunchOptions& options) {
         multiply_weight_gradients(d.rows(), d.gradient_jobs(d.main_gradients()),
                                   products::GradientMode::store, options);
       },
       [](ProductData& d) { return sampled_gradient_error(d, d.main_gradients(), 0.0); },
       {3, 2, 3, 12}},
      {"dw_fp32_add",
       kFp32Tolerance,
       all,
       [](ProductData& d, const LaunchOptions& options) {
         multiply_weight_gradients(d.rows(), d.gradient_jobs(d.main_gradients()),
                                   products::GradientMode::accumulate, options);
       },
       [](ProductData& d) { return sampled_gradient_error(d, d.main_gradients(), 3.0); },
       {3, 2, 3, 24}},
  };
}

}  // namespace megamoe::testing
