#include "bench/layer_stack.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>

#include "megamoe/error.h"

namespace megamoe::bench {
namespace {

constexpr std::int64_t kBf16Bytes = 2;

std::int64_t gradient_bytes(const LayerConfig& config) {
  return config.weight_gradient_mode == WeightGradientMode::store_bf16 ? 2 : 4;
}

TensorView view_of(const std::shared_ptr<std::byte>& memory, DType dtype,
                   std::initializer_list<std::int64_t> sizes) {
  TensorView view = tensor_view(reinterpret_cast<bf16*>(memory.get()), sizes);
  view.dtype = dtype;
  return view;
}

}  // namespace

StepState step_state(const LayerConfig& config, int num_ranks, std::int64_t num_layers) {
  const MoeShape& shape = config.shape;
  const std::int64_t matrices = is_gated(config.activation.kind) ? 3 : 2;
  const std::int64_t weight_count = num_layers * matrices * (shape.num_experts / num_ranks) *
                                    shape.intermediate_dim * shape.hidden_dim;
  const std::int64_t kept_rows =
      config.memory_mode == MemoryMode::saved ? resolved_saved_row_capacity(config, num_ranks) : 0;
  return {
      .weights = weight_count * kBf16Bytes,
      .weight_gradients = weight_count * gradient_bytes(config),
      .activations = (num_layers + 4) * shape.max_tokens * shape.hidden_dim * kBf16Bytes,
      .kept = num_layers * kept_rows * (matrices - 1) * shape.intermediate_dim * kBf16Bytes,
      .workspace = workspace_bytes(config, num_ranks).total(),
  };
}

void require_memory(const StepState& state, int ranks, std::int64_t available_bytes,
                    const char* place) {
  if (state.total() * ranks <= available_bytes) return;
  char text[400];
  std::snprintf(text, sizeof text,
                "a step of these layers needs %.1f GB a rank (weights %.1f, their gradients %.1f, "
                "activations %.1f, g and u that are kept %.1f, workspace %.1f); %s has %.1f GB "
                "free for %d rank%s: lower --layers or --tokens, or take --mode recompute",
                gigabytes(state.total()), gigabytes(state.weights),
                gigabytes(state.weight_gradients), gigabytes(state.activations),
                gigabytes(state.kept), gigabytes(state.workspace), place,
                gigabytes(available_bytes), ranks, ranks == 1 ? "" : "s");
  throw Error(ErrorCode::out_of_memory, text);
}

LayerStack::LayerStack(const LayerConfig& config, std::int64_t num_layers, Communicator& group,
                       StackMemory& memory, const std::vector<std::int32_t>& ids_TK)
    : T_(config.shape.max_tokens),
      H_(config.shape.hidden_dim),
      I_(config.shape.intermediate_dim),
      K_(config.shape.top_k),
      e_(config.shape.num_experts / group.size()),
      gradient_dtype_(config.weight_gradient_mode == WeightGradientMode::store_bf16 ? DType::bf16
                                                                                    : DType::fp32),
      memory_(memory),
      workspace_(config, group) {
  const auto seed = static_cast<std::uint64_t>(group.rank()) << 32;
  for (std::int64_t i = 0; i <= num_layers; ++i) {
    x_TH_.push_back(i == 0 ? noise(T_ * H_, 1.0, seed) : memory.allocate(T_ * H_ * kBf16Bytes));
  }
  dy_TH_ = noise(T_ * H_, 1.0, seed + 1);
  for (Tensor& gradient : gradients_TH_) gradient = memory.allocate(T_ * H_ * kBf16Bytes);
  ids_TK_ = memory.allocate(T_ * K_ * 4);
  memory.upload(ids_TK_.get(), ids_TK.data(), T_ * K_ * 4);
  // silu(g) * u of unit normal g and u has a deviation of 0.6; so has o, and y is a sum of K of
  // them. With these weights it has 1, and every layer sees numbers like the first one's.
  const std::vector<float> weights(
      T_ * K_, static_cast<float>(1.0 / (0.6 * std::sqrt(static_cast<double>(K_)))));
  weights_TK_ = memory.allocate(T_ * K_ * 4);
  memory.upload(weights_TK_.get(), weights.data(), T_ * K_ * 4);
  d_weights_TK_ = memory.allocate(T_ * K_ * 4);

  const std::int64_t count = e_ * I_ * H_;
  const double by_hidden = 1.0 / std::sqrt(static_cast<double>(H_));
  const double by_intermediate = 1.0 / std::sqrt(static_cast<double>(I_));
  for (std::int64_t i = 0; i < num_layers; ++i) {
    const std::uint64_t first = seed + 16 * static_cast<std::uint64_t>(i + 1);
    OneLayer& one = layers_.emplace_back();
    one.gate = noise(count, by_hidden, first);
    one.up = noise(count, by_hidden, first + 1);
    one.down = noise(count, by_intermediate, first + 2);
    for (Tensor* gradient : {&one.d_gate, &one.d_up, &one.d_down}) {
      *gradient = memory.allocate(count * gradient_bytes(config));
    }
    one.layer = std::make_unique<MoeLayer>(config, group, workspace_);
  }
}

/// Normal numbers, which repeat after about a million: to make them all would take longer than the
/// benchmark.
LayerStack::Tensor LayerStack::noise(std::int64_t count, double deviation, std::uint64_t seed) {
  constexpr std::int64_t kPeriod = 1'048'573;  // no row begins where another one does
  std::mt19937_64 engine(seed);
  std::normal_distribution<double> normal(0.0, deviation);
  std::vector<bf16> block(std::min(count, kPeriod));
  for (bf16& value : block) value = to_bf16(static_cast<float>(normal(engine)));
  Tensor tensor = memory_.allocate(count * kBf16Bytes);
  auto done = static_cast<std::int64_t>(block.size());
  memory_.upload(tensor.get(), block.data(), done * kBf16Bytes);
  while (done < count) {
    const std::int64_t next = std::min(done, count - done);
    memory_.copy(tensor.get() + done * kBf16Bytes, tensor.get(), next * kBf16Bytes);
    done += next;
  }
  return tensor;
}

ExpertWeights LayerStack::weights_of(const OneLayer& one) const {
  return {.gate = view_of(one.gate, DType::bf16, {e_, I_, H_}),
          .up = view_of(one.up, DType::bf16, {e_, I_, H_}),
          .down = view_of(one.down, DType::bf16, {e_, H_, I_})};
}

ExpertGradients LayerStack::gradients_of(const OneLayer& one) const {
  return {.gate = view_of(one.d_gate, gradient_dtype_, {e_, I_, H_}),
          .up = view_of(one.d_up, gradient_dtype_, {e_, I_, H_}),
          .down = view_of(one.d_down, gradient_dtype_, {e_, H_, I_})};
}

void LayerStack::forward(std::int64_t num_layers, Stream stream) {
  for (std::int64_t i = 0; i < num_layers; ++i) {
    OneLayer& one = layers_[i];
    one.call = CallContext();  // gives the memory of the last step back for this one
    one.call = one.layer->forward({.x = view_of(x_TH_[i], DType::bf16, {T_, H_}),
                                   .expert_ids = view_of(ids_TK_, DType::int32, {T_, K_}),
                                   .weights = view_of(weights_TK_, DType::fp32, {T_, K_}),
                                   .experts = weights_of(one)},
                                  {.y = view_of(x_TH_[i + 1], DType::bf16, {T_, H_})}, stream);
  }
}

void LayerStack::backward(std::int64_t num_layers, Stream stream) {
  for (std::int64_t i = num_layers; i-- > 0;) {
    OneLayer& one = layers_[i];
    const Tensor& dy = i == num_layers - 1 ? dy_TH_ : gradients_TH_[(i + 1) % 2];
    one.layer->backward(one.call,
                        {.x = view_of(x_TH_[i], DType::bf16, {T_, H_}),
                         .dy = view_of(dy, DType::bf16, {T_, H_}),
                         .experts = weights_of(one)},
                        {.dx = view_of(gradients_TH_[i % 2], DType::bf16, {T_, H_}),
                         .dweights = view_of(d_weights_TK_, DType::fp32, {T_, K_}),
                         .experts = gradients_of(one)},
                        stream);
  }
}

void LayerStack::check(Stream stream) {
  for (OneLayer& one : layers_) one.layer->check(stream);
}

}  // namespace megamoe::bench
