// A batch for CudaRouter: its tensors on the device, with rows apart and guards behind them, and
// what the CPU's router and fp64 make of it.
//
// Legend: T tokens, E experts, K slots.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "cuda/runtime.h"
#include "megamoe/cuda_router.h"
#include "routing/router_token.h"
#include "verify/router_oracle.h"

namespace megamoe::testing {

/// A matrix on device 0 whose rows lie 3 elements further apart than they are long, poisoned.
template <class T>
class DeviceMatrix {
 public:
  DeviceMatrix(std::int64_t rows, std::int64_t columns)
      : rows_(rows),
        columns_(columns),
        memory_(0, (rows * stride() + kGuard) * static_cast<std::int64_t>(sizeof(T)), "a test") {
    poison();
  }
  DeviceMatrix(std::int64_t rows, std::int64_t columns, const std::vector<T>& values)
      : DeviceMatrix(rows, columns) {
    upload(values);
  }

  [[nodiscard]] TensorView view() const {
    TensorView tensor = tensor_view(data(), {rows_, columns_});
    tensor.strides[0] = stride();
    return tensor;
  }
  /// One row as [columns].
  [[nodiscard]] TensorView vector_view() const { return tensor_view(data(), {columns_}); }

  /// Every byte 0xff: NaN, or -1.
  void poison() {
    cuda::check(cudaMemset(memory_.data(), 0xff, num_elements() * sizeof(T)), "poison");
    cuda::check(cudaDeviceSynchronize(), "poison");
  }
  void upload(const std::vector<T>& values) {
    std::vector<T> all = download_all();
    for (std::int64_t r = 0; r < rows_; ++r) {
      std::copy_n(values.begin() + r * columns_, columns_, all.begin() + r * stride());
    }
    cuda::check(
        cudaMemcpy(memory_.data(), all.data(), all.size() * sizeof(T), cudaMemcpyHostToDevice),
        "upload");
    cuda::check(cudaDeviceSynchronize(), "upload");
  }
  /// The elements, row by row; fails the test where anything was written between or behind rows.
  [[nodiscard]] std::vector<T> download() const {
    const std::vector<T> all = download_all();
    std::vector<T> values;
    values.reserve(static_cast<std::size_t>(rows_ * columns_));
    for (std::int64_t i = 0; i < static_cast<std::int64_t>(all.size()); ++i) {
      if (i < rows_ * stride() && i % stride() < columns_) {
        values.push_back(all[i]);
      } else {
        EXPECT_TRUE(is_poison(all[i])) << "element " << i << " is not of the matrix";
      }
    }
    return values;
  }
  [[nodiscard]] bool is_untouched() const {
    const std::vector<T> all = download_all();
    return std::all_of(all.begin(), all.end(), is_poison);
  }

 private:
  static constexpr std::int64_t kGuard = 64;

  static bool is_poison(const T& value) {
    const auto* bytes = reinterpret_cast<const unsigned char*>(&value);
    return std::all_of(bytes, bytes + sizeof(T), [](unsigned char byte) { return byte == 0xff; });
  }
  [[nodiscard]] std::int64_t stride() const { return columns_ + 3; }
  [[nodiscard]] std::size_t num_elements() const {
    return static_cast<std::size_t>(rows_ * stride() + kGuard);
  }
  [[nodiscard]] T* data() const { return reinterpret_cast<T*>(memory_.data()); }
  [[nodiscard]] std::vector<T> download_all() const {
    std::vector<T> all(num_elements());
    cuda::check(cudaDeviceSynchronize(), "download");
    cuda::check(
        cudaMemcpy(all.data(), memory_.data(), all.size() * sizeof(T), cudaMemcpyDeviceToHost),
        "download");
    return all;
  }

  std::int64_t rows_;
  std::int64_t columns_;
  cuda::DeviceMemory memory_;
};

/// Whether two vectors hold the same bits.
template <class T>
bool same_bits(const std::vector<T>& left, const std::vector<T>& right) {
  return left.size() == right.size() &&
         std::equal(reinterpret_cast<const unsigned char*>(left.data()),
                    reinterpret_cast<const unsigned char*>(left.data() + left.size()),
                    reinterpret_cast<const unsigned char*>(right.data()));
}

/// A batch on the host. Logits are values of `dtype`.
struct RouterBatch {
  RouterConfig config;
  DType dtype = DType::fp32;
  std::int64_t num_tokens = 0;
  std::int64_t num_slots = 0;
  std::vector<float> logits_TE;
  std::vector<float> bias_E;  ///< may be empty
  bool ids_are_forced = false;
  std::vector<std::int32_t> forced_TK;
  std::vector<float> d_weights_TK;
  float d_aux_loss = 0.75F;
};

inline float rounded_to(DType dtype, float value) {
  return dtype == DType::bf16 ? to_float(to_bf16(value)) : value;
}

enum class Logits { normal, steps };

/// normal: any, with a bias. steps: quarters, of which many are equal and no two others so close
/// that a rounding of exp could bridge it; without a bias.
inline RouterBatch make_batch(const RouterConfig& config, DType dtype, std::int64_t num_tokens,
                              Logits kind, unsigned seed) {
  RouterBatch batch;
  batch.config = config;
  batch.dtype = dtype;
  batch.num_tokens = num_tokens;
  batch.num_slots = config.top_k;
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  for (std::int64_t i = 0; i < num_tokens * config.num_experts; ++i) {
    batch.logits_TE.push_back(kind == Logits::normal
                                  ? rounded_to(dtype, 2.0F * normal(random))
                                  : static_cast<float>(static_cast<int>(random() % 33) - 16) / 4);
  }
  for (std::int64_t j = 0; kind == Logits::normal && j < config.num_experts; ++j) {
    batch.bias_E.push_back(0.01F * normal(random));
  }
  for (std::int64_t i = 0; i < num_tokens * batch.num_slots; ++i) {
    batch.d_weights_TK.push_back(normal(random));
  }
  return batch;
}

/// Forces ids with duplicates and with empty slots, at the first, at the last and at all slots of a
/// token.
inline void force_ids(RouterBatch& batch, unsigned seed) {
  std::mt19937 random(seed);
  batch.ids_are_forced = true;
  batch.forced_TK.clear();
  for (std::int64_t t = 0; t < batch.num_tokens; ++t) {
    for (std::int64_t k = 0; k < batch.num_slots; ++k) {
      const auto id =
          static_cast<std::int32_t>(random() % static_cast<unsigned>(batch.config.num_experts));
      const bool first = k == 0 && t % 5 == 1;
      const bool last = k == batch.num_slots - 1 && t % 5 == 2;
      const bool all = t % 5 == 3;
      const bool repeated = k > 0 && t % 5 == 4 && random() % 2 == 0;
      batch.forced_TK.push_back(first || last || all ? -1 : repeated ? batch.forced_TK.back() : id);
    }
  }
}

/// What a router makes of a batch; the load is that of the batch alone.
struct RouterResults {
  std::vector<std::int32_t> ids_TK;
  std::vector<float> weights_TK;
  std::vector<double> load;
  std::vector<float> d_logits_TE;
  double aux_loss = 0.0;
};

/// The batch's tensors on the device and one router's calls on them.
class DeviceRouting {
 public:
  explicit DeviceRouting(const RouterBatch& batch)
      : batch_(batch),
        logits_fp32(batch.num_tokens, batch.config.num_experts),
        logits_bf16(batch.num_tokens, batch.config.num_experts),
        bias(1, batch.config.num_experts),
        forced(batch.num_tokens, batch.num_slots),
        ids(batch.num_tokens, batch.num_slots),
        weights(batch.num_tokens, batch.num_slots),
        d_weights(batch.num_tokens, batch.num_slots),
        load(1, 2 * batch.config.num_experts + 1),
        d_aux_loss(1, 1),
        aux_loss(1, 1),
        d_logits(batch.num_tokens, batch.config.num_experts) {
    if (batch.dtype == DType::fp32) {
      logits_fp32.upload(batch.logits_TE);
    } else {
      std::vector<bf16> rounded(batch.logits_TE.size());
      std::transform(batch.logits_TE.begin(), batch.logits_TE.end(), rounded.begin(), to_bf16);
      logits_bf16.upload(rounded);
    }
    if (!batch.bias_E.empty()) bias.upload(batch.bias_E);
    if (batch.ids_are_forced) forced.upload(batch.forced_TK);
    d_weights.upload(batch.d_weights_TK);
    d_aux_loss.upload({batch.d_aux_loss});
    clear_outputs();
  }

  void clear_outputs() {
    ids.poison();
    weights.poison();
    d_logits.poison();
    aux_loss.poison();
    load.upload(std::vector<double>(2 * batch_.config.num_experts + 1, 0.0));
  }

  [[nodiscard]] ConstTensorView logits() const {
    return batch_.dtype == DType::fp32 ? logits_fp32.view() : logits_bf16.view();
  }
  [[nodiscard]] RouterInputs inputs() const {
    RouterInputs inputs;
    inputs.logits = logits();
    if (!batch_.bias_E.empty()) inputs.selection_bias = bias.vector_view();
    if (batch_.ids_are_forced) inputs.forced_ids = forced.view();
    return inputs;
  }
  [[nodiscard]] RouterOutputs outputs() const { return {ids.view(), weights.view()}; }
  [[nodiscard]] CudaRouterBackwardInputs backward_inputs() const {
    return {logits(), ids.view(), d_weights.view(), load.vector_view(), d_aux_loss.vector_view()};
  }

  /// The whole of a training step.
  void run(CudaRouter& router, Stream stream = {}) const {
    router.forward(inputs(), outputs(), stream);
    router.add_load(logits(), ids.view(), load.vector_view(), stream);
    router.aux_loss(load.vector_view(), aux_loss.vector_view(), stream);
    router.backward(backward_inputs(), d_logits.view(), stream);
  }

  [[nodiscard]] RouterResults results() const {
    return {ids.download(), weights.download(), load.download(), d_logits.download(),
            static_cast<double>(aux_loss.download()[0])};
  }

 private:
  RouterBatch batch_;

 public:
  DeviceMatrix<float> logits_fp32;
  DeviceMatrix<bf16> logits_bf16;
  DeviceMatrix<float> bias;
  DeviceMatrix<std::int32_t> forced;
  DeviceMatrix<std::int32_t> ids;
  DeviceMatrix<float> weights;
  DeviceMatrix<float> d_weights;
  DeviceMatrix<double> load;
  DeviceMatrix<float> d_aux_loss;
  DeviceMatrix<float> aux_loss;
  DeviceMatrix<float> d_logits;
};

inline RouterResults run_on_device(const RouterBatch& batch) {
  CudaRouter router(batch.config, 0);
  const DeviceRouting routing(batch);
  routing.run(router);
  router.check();
  return routing.results();
}

/// The CPU's router on a batch.
inline RouterResults run_on_cpu(RouterBatch batch) {
  const std::int64_t experts = batch.config.num_experts;
  RouterResults results;
  results.ids_TK.resize(static_cast<std::size_t>(batch.num_tokens * batch.num_slots));
  results.weights_TK.resize(results.ids_TK.size());
  results.d_logits_TE.resize(batch.logits_TE.size());
  RouterInputs inputs;
  inputs.logits = tensor_view(batch.logits_TE.data(), {batch.num_tokens, experts});
  if (!batch.bias_E.empty()) inputs.selection_bias = tensor_view(batch.bias_E.data(), {experts});
  const auto slots_view = [&](auto& values) {
    return tensor_view(values.data(), {batch.num_tokens, batch.num_slots});
  };
  if (batch.ids_are_forced) inputs.forced_ids = slots_view(batch.forced_TK);
  Router router(batch.config);
  RouterContext context;
  router.forward(inputs, {slots_view(results.ids_TK), slots_view(results.weights_TK)}, context);
  RouterLoad load(experts);
  router.add_load(context, load);
  RouterBackwardInputs backward;
  backward.d_weights = slots_view(batch.d_weights_TK);
  backward.global_load = &load;
  backward.d_aux_loss = batch.d_aux_loss;
  RouterBackwardOutputs outputs;
  outputs.d_logits = tensor_view(results.d_logits_TE.data(), {batch.num_tokens, experts});
  router.backward(context, backward, outputs);
  results.load.assign(load.values().begin(), load.values().end());
  results.aux_loss = router.aux_loss(load);
  return results;
}

/// The independent fp64 router: logits as x, and the identity as the router's weight.
inline verify::RouterOracle make_oracle(const RouterBatch& batch) {
  const std::int64_t experts = batch.config.num_experts;
  verify::RouterOracle oracle;
  oracle.num_tokens = batch.num_tokens;
  oracle.hidden_dim = experts;
  oracle.num_experts = experts;
  oracle.top_k = batch.num_slots;
  oracle.scores = batch.config.score_function == ScoreFunction::softmax
                      ? verify::RouterOracle::Scores::softmax
                      : verify::RouterOracle::Scores::sigmoid;
  oracle.renormalise = batch.config.weight_norm == WeightNorm::sum_to_one
                           ? verify::RouterOracle::Renormalise::on
                           : verify::RouterOracle::Renormalise::off;
  oracle.scale = static_cast<double>(batch.config.scale);
  oracle.x_TH.assign(batch.logits_TE.begin(), batch.logits_TE.end());
  oracle.weight_EH.assign(static_cast<std::size_t>(experts * experts), 0.0);
  for (std::int64_t j = 0; j < experts; ++j) oracle.weight_EH[j * experts + j] = 1.0;
  oracle.selection_bias_E.assign(batch.bias_E.begin(), batch.bias_E.end());
  return oracle;
}

/// Gradients of the logits in fp64, the auxiliary loss' part by the library's formulas (which the
/// CPU's tests compare with finite differences), the rest by the oracle.
inline std::vector<double> oracle_gradients(const RouterBatch& batch,
                                            const std::vector<std::int32_t>& ids_TK,
                                            const std::vector<double>& load) {
  std::vector<double> d_weights(batch.d_weights_TK.begin(), batch.d_weights_TK.end());
  for (std::size_t i = 0; i < ids_TK.size(); ++i) {
    if (ids_TK[i] < 0) d_weights[i] = 0.0;
  }
  const verify::RouterOracle oracle = make_oracle(batch);
  std::vector<double> gradients = verify::router_gradients(oracle, ids_TK, d_weights).dx_TH;
  if (batch.config.aux_loss_alpha == 0.0F) return gradients;
  const auto experts = static_cast<std::size_t>(batch.config.num_experts);
  RouterLoad global(batch.config.num_experts);
  std::copy(load.begin(), load.end(), global.values().begin());
  std::vector<double> slopes(experts);
  detail::compute_aux_slopes<double>(batch.config, global, static_cast<double>(batch.d_aux_loss),
                                     slopes);
  const std::vector<double> scores = verify::router_scores(oracle);
  for (std::size_t first = 0; first < gradients.size(); first += experts) {
    const std::span<const double> scores_E = std::span(scores).subspan(first, experts);
    std::vector<double> grad(experts, 0.0);
    detail::add_aux_gradient<double>(batch.config.score_function, scores_E, slopes, grad);
    detail::scores_backward<double>(batch.config.score_function, scores_E, grad);
    for (std::size_t j = 0; j < experts; ++j) gradients[first + j] += grad[j];
  }
  return gradients;
}

inline RouterConfig router_config(std::int64_t num_experts, std::int64_t top_k,
                                  ScoreFunction function, WeightNorm norm,
                                  std::int64_t num_groups = 1, std::int64_t top_groups = 1) {
  RouterConfig config;
  config.num_experts = num_experts;
  config.top_k = top_k;
  config.score_function = function;
  config.weight_norm = norm;
  config.scale = 2.5F;
  config.num_groups = num_groups;
  config.top_groups = top_groups;
  return config;
}

struct RouterCase {
  RouterConfig config;
  DType dtype;
  std::int64_t num_tokens;
};

inline std::string name_of(const RouterCase& c) {
  return std::string(c.config.score_function == ScoreFunction::softmax ? "softmax" : "sigmoid") +
         (c.config.weight_norm == WeightNorm::none ? ", plain, " : ", sum to one, ") +
         to_string(c.dtype) + ", T " + std::to_string(c.num_tokens) + ", E " +
         std::to_string(c.config.num_experts) + ", K " + std::to_string(c.config.top_k);
}

/// Score function x normalisation x dtype x shapes; 0, 1 and 257 tokens.
inline std::vector<RouterCase> all_router_cases() {
  std::vector<RouterCase> cases;
  for (const ScoreFunction function : {ScoreFunction::softmax, ScoreFunction::sigmoid}) {
    for (const WeightNorm norm : {WeightNorm::none, WeightNorm::sum_to_one}) {
      for (const DType dtype : {DType::fp32, DType::bf16}) {
        for (const auto& [experts, slots] : {std::pair{1, 1},
                                             {8, 2},
                                             {31, 16},
                                             {60, 4},
                                             {128, 8},
                                             {129, 6},
                                             {256, 1},
                                             {257, 8},
                                             {512, 16}}) {
          for (const std::int64_t tokens : {0, 1, 257}) {
            // The oracle takes time with the square of E.
            cases.push_back({router_config(experts, slots, function, norm), dtype,
                             experts > 256 && tokens > 1 ? 33 : tokens});
          }
        }
      }
    }
  }
  return cases;
}

/// Relative error of a score, share or weight in fp32, in units of 2^-24: the argument of exp, up
/// to 32, is rounded (16); exp itself (2), a sum over the experts of a lane, of lanes, of slots
/// (16 + 5 + 16), quotients and scale (4); the rest is reserve.
inline constexpr double kScoreError = 64 * 0x1p-24;

}  // namespace megamoe::testing
