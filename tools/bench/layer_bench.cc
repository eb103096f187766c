#include "bench/layer_bench.h"

#include <chrono>

#include "megamoe/megamoe.h"

namespace megamoe::bench {
namespace {

using Clock = std::chrono::steady_clock;

double elapsed_ms(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

/// bf16 numbers between -size and size that look random and cost little to make.
std::vector<bf16> noise(std::int64_t count, float size, std::uint64_t seed) {
  std::vector<bf16> values(count);
  std::uint64_t state = seed * 0x9e3779b97f4a7c15ULL + 1;
  for (bf16& value : values) {
    state = state * 6364136223846793005ULL + 1442695040888963407ULL;
    value = to_bf16(size * (static_cast<float>(state >> 40) * 0x1p-23F - 1.0F));
  }
  return values;
}

/// Tensors of one rank. e = E/R experts.
class RankTensors {
 public:
  RankTensors(const MoeShape& shape, int num_ranks, int rank, const std::vector<std::int32_t>& ids)
      : ids_TK_(ids) {
    const std::int64_t T = shape.max_tokens, H = shape.hidden_dim, I = shape.intermediate_dim;
    const std::int64_t K = shape.top_k, e = shape.num_experts / num_ranks;
    const auto seed = static_cast<std::uint64_t>(rank) * 16;
    x_TH_ = noise(T * H, 1.0F, seed + 1);
    dy_TH_ = noise(T * H, 1.0F, seed + 2);
    gate_eIH_ = noise(e * I * H, 0.02F, seed + 3);
    up_eIH_ = noise(e * I * H, 0.02F, seed + 4);
    down_eHI_ = noise(e * H * I, 0.02F, seed + 5);
    y_TH_.resize(T * H);
    dx_TH_.resize(T * H);
    weights_TK_.assign(T * K, 1.0F / static_cast<float>(K));
    dweights_TK_.resize(T * K);
    dgate_eIH_.resize(e * I * H);
    dup_eIH_.resize(e * I * H);
    ddown_eHI_.resize(e * H * I);

    const ExpertWeights experts{.gate = view(gate_eIH_, {e, I, H}),
                                .up = view(up_eIH_, {e, I, H}),
                                .down = view(down_eHI_, {e, H, I})};
    forward_input = {.x = view(x_TH_, {T, H}),
                     .expert_ids = view(ids_TK_, {T, K}),
                     .weights = view(weights_TK_, {T, K}),
                     .experts = experts};
    forward_output = {.y = view(y_TH_, {T, H})};
    backward_input = {.x = view(x_TH_, {T, H}), .dy = view(dy_TH_, {T, H}), .experts = experts};
    backward_output = {.dx = view(dx_TH_, {T, H}),
                       .dweights = view(dweights_TK_, {T, K}),
                       .experts = {.gate = view(dgate_eIH_, {e, I, H}),
                                   .up = view(dup_eIH_, {e, I, H}),
                                   .down = view(ddown_eHI_, {e, H, I})}};
  }

  ForwardInput forward_input;
  ForwardOutput forward_output;
  BackwardInput backward_input;
  BackwardOutput backward_output;

 private:
  template <class T>
  static TensorView view(std::vector<T>& values, std::initializer_list<std::int64_t> sizes) {
    return tensor_view(values.data(), sizes);
  }

  std::vector<bf16> x_TH_, y_TH_, dy_TH_, dx_TH_;
  std::vector<std::int32_t> ids_TK_;
  std::vector<float> weights_TK_, dweights_TK_;
  std::vector<bf16> gate_eIH_, up_eIH_, down_eHI_;
  std::vector<bf16> dgate_eIH_, dup_eIH_, ddown_eHI_;
};

}  // namespace

LayerTimes time_layer(const LayerConfig& config,
                      const std::vector<std::vector<std::int32_t>>& ids_RTK, int num_repeats) {
  LayerTimes times;
  run_ranks(static_cast<int>(ids_RTK.size()), [&](Communicator& ranks) {
    RankTensors tensors(config.shape, ranks.size(), ranks.rank(), ids_RTK[ranks.rank()]);
    Workspace workspace(config, ranks);
    MoeLayer layer(config, ranks, workspace);
    const auto timed = [&](const char* what, const auto& pass) {
      ranks.barrier(what, config.entry_deadline_s);
      const Clock::time_point start = Clock::now();
      pass();
      ranks.barrier(what, config.inner_deadline_s);
      return elapsed_ms(start);
    };
    CallContext call;
    for (int repeat = -1; repeat < num_repeats; ++repeat) {
      const double forward_ms = timed("the end of a timed forward", [&] {
        call = layer.forward(tensors.forward_input, tensors.forward_output);
      });
      const double backward_ms = timed("the end of a timed backward", [&] {
        layer.backward(call, tensors.backward_input, tensors.backward_output);
      });
      if (ranks.rank() != 0 || repeat < 0) continue;
      times.forward_ms.push_back(forward_ms);
      times.backward_ms.push_back(backward_ms);
    }
  });
  return times;
}

}  // namespace megamoe::bench
