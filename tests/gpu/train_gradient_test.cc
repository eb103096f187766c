// The gradient through router and layer together, on the GPU, against the slope of the fp64
// oracle's loss: products with the router's weight, CudaRouter and MoeLayer, forward and backward.
//
// Shapes: T tokens, H hidden, I intermediate, E experts, K slots.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <map>
#include <numeric>
#include <string>
#include <vector>

#include "megamoe/layer.h"
#include "train/backend.h"
#include "verify/oracle.h"
#include "verify/problem.h"
#include "verify/router_oracle.h"

namespace megamoe::trainer {
namespace {

using verify::OracleInput;
using verify::Problem;
using verify::ProblemSpec;
using verify::RouterOracle;

/// By the tensor's name.
using Gradients = std::map<std::string, std::vector<double>>;

double dot(const std::vector<double>& a, const std::vector<double>& b) {
  return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
}
double norm(const std::vector<double>& a) { return std::sqrt(dot(a, a)); }
double distance(const std::vector<double>& a, const std::vector<double>& b) {
  std::vector<double> difference(a.size());
  for (std::size_t i = 0; i < a.size(); ++i) difference[i] = a[i] - b[i];
  return norm(difference);
}

/// Router and layer in fp64, for ids that are held: loss = sum of y * dy.
struct Oracle {
  OracleInput layer;
  RouterOracle router;

  Oracle(const Problem& problem, const std::vector<std::int32_t>& expert_ids_TK)
      : layer(oracle_input(problem)), router(router_oracle(problem)) {
    router.renormalise = RouterOracle::Renormalise::on;
    layer.expert_ids_TK = expert_ids_TK;
  }
  verify::OracleResult run(verify::Rounding rounding) {
    router.x_TH = layer.x_TH;
    layer.weights_TK = routing_weights(router, layer.expert_ids_TK);
    return evaluate(layer, rounding, verify::GradientStorage::fp32);
  }
  double loss() { return dot(run(verify::Rounding::none).y_TH, layer.dy_TH); }
  Gradients gradients(verify::Rounding rounding) {
    const verify::OracleResult result = run(rounding);
    const verify::RouterGradients through_router =
        router_gradients(router, layer.expert_ids_TK, result.dweights_TK);
    Gradients gradients = {{"x", result.dx_TH},
                           {"router", through_router.dweight_EH},
                           {"gate", result.dgate_EIH},
                           {"up", result.dup_EIH},
                           {"down", result.ddown_EHI}};
    for (std::size_t i = 0; i < result.dx_TH.size(); ++i) {
      gradients["x"][i] += through_router.dx_TH[i];
    }
    return gradients;
  }
  std::vector<double>& tensor(const std::string& name) {
    if (name == "x") return layer.x_TH;
    if (name == "router") return router.weight_EH;
    if (name == "gate") return layer.gate_EIH;
    return name == "up" ? layer.up_EIH : layer.down_EHI;
  }
};

/// What the GPU makes of a problem of one rank.
struct OnDevice {
  Gradients gradients;
  std::vector<std::int32_t> expert_ids_TK;
};

template <class T>
Buffer<T> uploaded(TrainBackend& backend, const std::vector<T>& values) {
  Buffer<T> buffer(backend, static_cast<std::int64_t>(values.size()));
  backend.upload(buffer.data(), values.data(), values.size() * sizeof(T));
  return buffer;
}

template <class T>
std::vector<T> downloaded(TrainBackend& backend, const Buffer<T>& buffer) {
  std::vector<T> values(buffer.count());
  backend.download(values.data(), buffer.data(), values.size() * sizeof(T));
  return values;
}

OnDevice run_on_device(const Problem& problem, Overlap overlap) {
  const ProblemSpec& spec = problem.spec;
  const std::int64_t T = spec.num_tokens(), H = spec.hidden_dim, I = spec.intermediate_dim;
  const std::int64_t E = spec.num_experts, K = spec.top_k;
  const auto ranks = make_thread_communicators(1);
  const auto owned = make_backend(Backend::cuda, *ranks[0]);
  TrainBackend& backend = *owned;
  RouterConfig router_config;
  router_config.num_experts = E;
  router_config.top_k = K;
  router_config.weight_norm = WeightNorm::sum_to_one;
  const auto router = backend.make_router({router_config, T, H});
  LayerConfig config;
  config.shape = {T, H, I, spec.num_experts, spec.top_k};
  config.backend = Backend::cuda;
  config.overlap = overlap;
  config.weight_gradient_mode = WeightGradientMode::store_fp32;
  config.row_capacity = T * K;
  Workspace workspace(config, backend.group());
  MoeLayer layer(config, backend.group(), workspace);

  Buffer<bf16> x = uploaded(backend, problem.x_TH), dy = uploaded(backend, problem.dy_TH);
  Buffer<bf16> gate = uploaded(backend, problem.gate_EIH);
  Buffer<bf16> up = uploaded(backend, problem.up_EIH);
  Buffer<bf16> down = uploaded(backend, problem.down_EHI);
  Buffer<float> weight = uploaded(backend, problem.router_weight_EH);
  Buffer<std::int32_t> ids(backend, T * K);
  Buffer<float> weights(backend, T * K), d_weights(backend, T * K), wide_dx(backend, T * H);
  Buffer<double> load(backend, 2 * E + 1);
  Buffer<bf16> y(backend, T * H), dx(backend, T * H);
  Buffer<float> d_gate(backend, E * I * H), d_up(backend, E * I * H), d_down(backend, E * I * H);
  Buffer<float> d_router(backend, E * H);

  const std::vector<Share> shards = {{0, T / 3}, {T / 3, T - T / 3}};
  router->forward(shards, {x.data(), weight.data()}, {ids.data(), weights.data()}, load.data());
  const ExpertWeights experts = {tensor_view(gate.data(), {E, I, H}),
                                 tensor_view(up.data(), {E, I, H}),
                                 tensor_view(down.data(), {E, H, I})};
  const CallContext call =
      layer.forward({tensor_view(x.data(), {T, H}), tensor_view(ids.data(), {T, K}),
                     tensor_view(weights.data(), {T, K}), experts},
                    {tensor_view(y.data(), {T, H})}, backend.stream());
  layer.backward(call, {tensor_view(x.data(), {T, H}), tensor_view(dy.data(), {T, H}), experts},
                 {tensor_view(dx.data(), {T, H}),
                  tensor_view(d_weights.data(), {T, K}),
                  {tensor_view(d_gate.data(), {E, I, H}), tensor_view(d_up.data(), {E, I, H}),
                   tensor_view(d_down.data(), {E, H, I})}},
                 backend.stream());
  backend.operations().widen(T * H, dx.data(), wide_dx.data());
  const std::vector<float*> d_router_of_shards(2, d_router.data());
  router->backward(shards, {x.data(), weight.data()}, d_weights.data(), RouterLoad(E),
                   {wide_dx.data(), d_router_of_shards});
  layer.check(backend.stream());
  const auto wide = [&](const Buffer<float>& buffer) {
    return verify::to_doubles(downloaded(backend, buffer));
  };
  OnDevice result{{{"x", wide(wide_dx)},
                   {"router", wide(d_router)},
                   {"gate", wide(d_gate)},
                   {"up", wide(d_up)},
                   {"down", wide(d_down)}},
                  downloaded(backend, ids)};
  router->check();
  return result;
}

class TrainCudaGradient : public testing::TestWithParam<Overlap> {};

// The oracle's loss is differentiated by central differences along the oracle's own gradient and
// along a random direction; that is what the oracle's gradients are worth. The GPU's gradients may
// differ from them by twice what the contract's roundings to bf16 do (or the rounding of fp32
// sums), and their slope along the gradient by as much.
TEST_P(TrainCudaGradient, ThroughRouterAndLayerIsTheSlopeOfTheOraclesLoss) {
  ProblemSpec spec;
  spec.tokens_per_rank = {96};
  spec.hidden_dim = 128;
  spec.intermediate_dim = 64;
  spec.num_experts = 8;
  spec.top_k = 3;
  spec.seed = 11;
  const Problem problem = make_problem(spec);
  const OnDevice device = run_on_device(problem, GetParam());
  Oracle oracle(problem, device.expert_ids_TK);
  EXPECT_LE(selection_regret(oracle.router, device.expert_ids_TK), 1e-6);
  const Gradients exact = oracle.gradients(verify::Rounding::none);
  const Gradients rounded = oracle.gradients(verify::Rounding::contract);
  std::uint64_t stream = 1000;
  for (const auto& [name, gradient] : exact) {
    std::vector<double>& tensor = oracle.tensor(name);
    const std::vector<double> kept = tensor;
    const auto slope_along = [&](const std::vector<double>& direction) {
      const double step = 1e-5 * norm(kept) / norm(direction);
      const auto loss_at = [&](double distance_along) {
        for (std::size_t i = 0; i < kept.size(); ++i) {
          tensor[i] = kept[i] + distance_along * direction[i];
        }
        return oracle.loss();
      };
      const double slope = (loss_at(step) - loss_at(-step)) / (2 * step);
      tensor = kept;
      return slope;
    };
    std::vector<double> random(gradient.size());
    for (std::size_t i = 0; i < random.size(); ++i) {
      random[i] = verify::normal_at(spec.seed, stream, i);
    }
    ++stream;
    const double length = norm(gradient);
    ASSERT_GT(length, 0.0) << name;
    EXPECT_NEAR(slope_along(random), dot(gradient, random), 1e-6 * length * norm(random)) << name;
    const double slope = slope_along(gradient);
    EXPECT_NEAR(slope, length * length, 1e-6 * length * length) << name;

    const std::vector<double>& on_device = device.gradients.at(name);
    ASSERT_EQ(on_device.size(), gradient.size()) << name;
    const double baseline = distance(rounded.at(name), gradient);
    const double allowed = std::max(2 * baseline, 4 * 128.0 / 16 * 0x1p-24 * length);
    EXPECT_LE(distance(on_device, gradient), allowed) << name;
    EXPECT_NEAR(dot(on_device, gradient), slope, allowed * length) << name;
    std::printf("%-6s error %.1e of its norm, of the contract's roundings alone %.1e\n",
                name.c_str(), distance(on_device, gradient) / length, baseline / length);
  }
}
INSTANTIATE_TEST_SUITE_P(Overlap, TrainCudaGradient, testing::Values(Overlap::on, Overlap::off));

}  // namespace
}  // namespace megamoe::trainer
