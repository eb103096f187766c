// One layer, forward and backward, on two ranks that are threads of this process. Each rank holds
// its own tokens and two of the four experts.
#include <megamoe/megamoe.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <vector>

namespace {

using megamoe::bf16;
using megamoe::tensor_view;

constexpr std::int64_t T = 16;  // tokens of a rank
constexpr std::int64_t H = 64;  // hidden
constexpr std::int64_t I = 32;  // intermediate
constexpr std::int64_t E = 4;   // experts, over all ranks
constexpr std::int64_t K = 2;   // experts that a token goes to
constexpr int kNumRanks = 2;
constexpr std::int64_t e = E / kNumRanks;  // experts of a rank

/// bf16 values that differ from element to element, of about the given size.
std::vector<bf16> waves(std::int64_t count, float size) {
  std::vector<bf16> values(count);
  for (std::int64_t i = 0; i < count; ++i) {
    values[i] = megamoe::to_bf16(size * std::sin(0.7F * static_cast<float>(i)));
  }
  return values;
}

/// What a rank owns; a training program has these already.
struct RankData {
  std::vector<bf16> x_TH = waves(T * H, 1.0F), dy_TH = waves(T * H, 0.1F);
  std::vector<bf16> y_TH = waves(T * H, 0.0F), dx_TH = waves(T * H, 0.0F);
  std::vector<std::int32_t> ids_TK = std::vector<std::int32_t>(T * K);
  std::vector<float> weights_TK = std::vector<float>(T * K, 1.0F / K);
  std::vector<float> dweights_TK = std::vector<float>(T * K);
  std::vector<bf16> gate_eIH = waves(e * I * H, 0.1F), up_eIH = waves(e * I * H, 0.1F);
  std::vector<bf16> down_eHI = waves(e * H * I, 0.1F);
  std::vector<bf16> dgate_eIH = gate_eIH, dup_eIH = up_eIH, ddown_eHI = down_eHI;

  megamoe::ExpertWeights experts{.gate = tensor_view(gate_eIH.data(), {e, I, H}),
                                 .up = tensor_view(up_eIH.data(), {e, I, H}),
                                 .down = tensor_view(down_eHI.data(), {e, H, I})};
  megamoe::ExpertGradients gradients{.gate = tensor_view(dgate_eIH.data(), {e, I, H}),
                                     .up = tensor_view(dup_eIH.data(), {e, I, H}),
                                     .down = tensor_view(ddown_eHI.data(), {e, H, I})};
  megamoe::TensorView x = tensor_view(x_TH.data(), {T, H});
  megamoe::TensorView y = tensor_view(y_TH.data(), {T, H});
  megamoe::TensorView dx = tensor_view(dx_TH.data(), {T, H});
  megamoe::TensorView dy = tensor_view(dy_TH.data(), {T, H});
  megamoe::TensorView ids = tensor_view(ids_TK.data(), {T, K});
  megamoe::TensorView weights = tensor_view(weights_TK.data(), {T, K});
  megamoe::TensorView dweights = tensor_view(dweights_TK.data(), {T, K});

  RankData() {
    for (std::int64_t i = 0; i < T * K; ++i) ids_TK[i] = static_cast<std::int32_t>(i * 7 % E);
  }
};

double squared_norm(const std::vector<bf16>& values) {
  double sum = 0.0;
  for (const bf16 value : values) sum += std::pow(megamoe::to_float(value), 2);
  return sum;
}

void run_rank(megamoe::Communicator& ranks) {
  RankData my;
  // README: begin
  megamoe::LayerConfig config;
  config.shape = {
      .max_tokens = T, .hidden_dim = H, .intermediate_dim = I, .num_experts = E, .top_k = K};
  megamoe::Workspace workspace(config, ranks);
  megamoe::MoeLayer layer(config, ranks, workspace);

  megamoe::CallContext call = layer.forward(
      {.x = my.x, .expert_ids = my.ids, .weights = my.weights, .experts = my.experts}, {.y = my.y});
  layer.backward(call, {.x = my.x, .dy = my.dy, .experts = my.experts},
                 {.dx = my.dx, .dweights = my.dweights, .experts = my.gradients});
  // README: end
  std::printf("rank %d of %d: %lld rows for %lld experts, |y| %.4f, |dx| %.4f\n", ranks.rank(),
              ranks.size(), static_cast<long long>(call.num_rows()), static_cast<long long>(e),
              std::sqrt(squared_norm(my.y_TH)), std::sqrt(squared_norm(my.dx_TH)));
}

}  // namespace

int main() {
  try {
    megamoe::run_ranks(kNumRanks, run_rank);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
