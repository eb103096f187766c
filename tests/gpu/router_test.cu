// The router on the device against the CPU's.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "gpu/device_buffers.cuh"
#include "kernels/router/router.h"

namespace megamoe::testing {
namespace {

struct Routed {
  std::vector<std::int32_t> ids;
  std::vector<float> weights;
  std::vector<float> scores;
  std::vector<float> shares;
  unsigned long long first_bad_token;
};

Routed route_on_device(const RouterConfig& config, const std::vector<float>& logits,
                       const std::vector<float>& bias, std::int64_t num_tokens) {
  const std::int64_t slots = num_tokens * config.top_k;
  DeviceBuffer<float> logits_TE(logits.size());
  DeviceBuffer<float> bias_E(bias.size());
  DeviceBuffer<std::int32_t> ids(slots);
  DeviceBuffer<float> weights(slots);
  DeviceBuffer<float> scores(num_tokens * config.num_experts);
  DeviceBuffer<float> shares(slots);
  DeviceBuffer<unsigned long long> bad(1);
  logits_TE.upload(logits);
  bias_E.upload(bias);
  ids.poison();
  weights.poison();
  scores.poison();
  shares.poison();
  bad.poison();
  gpu::route(
      config,
      {logits_TE.data(), config.num_experts, bias.empty() ? nullptr : bias_E.data(), ids.data(),
       config.top_k, weights.data(), config.top_k, scores.data(), shares.data(), bad.data()},
      num_tokens, nullptr);
  check_cuda(cudaDeviceSynchronize(), "route");
  return {ids.download(), weights.download(), scores.download(), shares.download(),
          bad.download()[0]};
}

struct RoutedOnCpu {
  std::vector<std::int32_t> ids;
  std::vector<float> weights;
  std::vector<float> scores;
};

RoutedOnCpu route_on_cpu(const RouterConfig& config, std::vector<float> logits,
                         std::vector<float> bias, std::int64_t num_tokens) {
  RoutedOnCpu routed;
  routed.ids.resize(num_tokens * config.top_k);
  routed.weights.resize(routed.ids.size());
  RouterInputs inputs;
  inputs.logits = tensor_view(logits.data(), {num_tokens, config.num_experts});
  if (!bias.empty()) inputs.selection_bias = tensor_view(bias.data(), {config.num_experts});
  Router router(config);
  RouterContext context;
  router.forward(inputs,
                 {tensor_view(routed.ids.data(), {num_tokens, config.top_k}),
                  tensor_view(routed.weights.data(), {num_tokens, config.top_k})},
                 context);
  const auto* scores = static_cast<const float*>(context.scores().data);
  routed.scores.assign(scores, scores + num_tokens * config.num_experts);
  return routed;
}

/// `num_terms` is the length of the longest sum behind a value; the CPU adds one by one, the device
/// as a tree. The rest is exp and a quotient.
void expect_close(const std::vector<float>& actual, const std::vector<float>& expected,
                  std::int64_t num_terms, const char* what) {
  const float tolerance = static_cast<float>(num_terms + 8) * 0x1p-24F;
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i) {
    const float bound = tolerance * std::abs(expected[i]) + 1e-38F;
    ASSERT_LE(std::abs(actual[i] - expected[i]), bound) << what << " " << i;
  }
}

class RouterConfigs : public ::testing::TestWithParam<RouterConfig> {
 protected:
  void SetUp() override {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) GTEST_SKIP() << "no CUDA device";
  }
};

/// Logits and biases in steps that no rounding of exp can bridge, with many exact ties.
TEST_P(RouterConfigs, IdsEqualTheCpuWithTies) {
  const RouterConfig& config = GetParam();
  std::mt19937 random(17);
  for (const std::int64_t num_tokens : {1, 7, 600}) {
    std::vector<float> logits(num_tokens * config.num_experts);
    for (float& logit : logits)
      logit = static_cast<float>(static_cast<int>(random() % 33) - 16) / 4;
    const Routed device = route_on_device(config, logits, {}, num_tokens);
    const RoutedOnCpu cpu = route_on_cpu(config, logits, {}, num_tokens);
    EXPECT_EQ(device.first_bad_token, ~0ULL);
    // Group scores are sums: those of different pairs may lie within a rounding of each other.
    if (config.num_groups == 1) {
      EXPECT_EQ(device.ids, cpu.ids);
      expect_close(device.weights, cpu.weights, config.num_experts, "weight");
    }
    expect_close(device.scores, cpu.scores, config.num_experts, "score");
  }
}

/// Any logits, with a bias: where ids differ, the biased scores are equal up to rounding.
TEST_P(RouterConfigs, SelectsTheHighestBiasedScores) {
  const RouterConfig& config = GetParam();
  std::mt19937 random(18);
  std::normal_distribution<float> normal;
  constexpr std::int64_t kTokens = 500;
  std::vector<float> logits(kTokens * config.num_experts);
  std::vector<float> bias(config.num_experts);
  for (float& logit : logits) logit = 2 * normal(random);
  for (float& value : bias) value = 0.01F * normal(random);
  const Routed device = route_on_device(config, logits, bias, kTokens);
  const RoutedOnCpu cpu = route_on_cpu(config, logits, bias, kTokens);
  expect_close(device.scores, cpu.scores, config.num_experts, "score");
  int num_differences = 0;
  for (std::size_t i = 0; i < cpu.ids.size(); ++i) {
    const std::int64_t token = static_cast<std::int64_t>(i) / config.top_k;
    ASSERT_GE(device.ids[i], 0);
    ASSERT_LT(device.ids[i], config.num_experts);
    if (device.ids[i] == cpu.ids[i]) {
      EXPECT_NEAR(device.weights[i], cpu.weights[i], 4e-6F * std::abs(cpu.weights[i]) + 1e-30F);
      continue;
    }
    ++num_differences;
    if (config.num_groups > 1) continue;
    const auto biased = [&](std::int32_t id) {
      return cpu.scores[token * config.num_experts + id] + bias[id];
    };
    EXPECT_NEAR(biased(device.ids[i]), biased(cpu.ids[i]), 1e-6F) << "token " << token;
  }
  EXPECT_LE(num_differences, 8);
}

TEST_P(RouterConfigs, NonFiniteLogitsAreReported) {
  const RouterConfig& config = GetParam();
  std::vector<float> logits(20 * config.num_experts, 0.5F);
  logits[13 * config.num_experts] = std::numeric_limits<float>::quiet_NaN();
  logits[9 * config.num_experts + config.num_experts - 1] = std::numeric_limits<float>::infinity();
  const Routed device = route_on_device(config, logits, {}, 20);
  EXPECT_EQ(device.first_bad_token, 9U);
  for (std::int64_t k = 0; k < config.top_k; ++k) {
    EXPECT_EQ(device.ids[9 * config.top_k + k], -1);
    EXPECT_EQ(device.weights[9 * config.top_k + k], 0.0F);
    EXPECT_GE(device.ids[8 * config.top_k + k], 0);
  }
}

RouterConfig router_config(std::int64_t num_experts, std::int64_t top_k, ScoreFunction function,
                           WeightNorm norm, std::int64_t num_groups, std::int64_t top_groups) {
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

INSTANTIATE_TEST_SUITE_P(
    Configs, RouterConfigs,
    ::testing::Values(router_config(128, 8, ScoreFunction::softmax, WeightNorm::sum_to_one, 1, 1),
                      router_config(60, 4, ScoreFunction::softmax, WeightNorm::none, 1, 1),
                      router_config(8, 2, ScoreFunction::sigmoid, WeightNorm::sum_to_one, 1, 1),
                      router_config(512, 16, ScoreFunction::softmax, WeightNorm::sum_to_one, 1, 1),
                      router_config(1, 1, ScoreFunction::softmax, WeightNorm::none, 1, 1),
                      router_config(256, 8, ScoreFunction::sigmoid, WeightNorm::sum_to_one, 8, 4)));

}  // namespace
}  // namespace megamoe::testing
