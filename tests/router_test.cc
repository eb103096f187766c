// The router's forward: scores, selection and weights.
#include "megamoe/router.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <numeric>

#include "megamoe/error.h"
#include "router_fixture.h"
#include "router_naive.h"

namespace megamoe {
namespace {

using testing::route;
using testing::route_logits;
using testing::Routed;
using testing::scores_of;

RouterConfig config_of(std::int64_t experts, std::int64_t top_k, ScoreFunction function,
                       WeightNorm norm) {
  RouterConfig config;
  config.num_experts = experts;
  config.top_k = top_k;
  config.score_function = function;
  config.weight_norm = norm;
  return config;
}

TEST(RouterForward, SoftmaxByHand) {
  // Scores 1/8, 4/8, 2/8, 1/8.
  const std::vector<float> logits{0.0F, std::log(4.0F), std::log(2.0F), 0.0F};
  Router plain(config_of(4, 2, ScoreFunction::softmax, WeightNorm::none));
  Routed routed = route_logits(plain, logits);
  EXPECT_EQ(routed.ids, (std::vector<std::int32_t>{1, 2}));
  EXPECT_NEAR(routed.weights[0], 0.5, 1e-6);
  EXPECT_NEAR(routed.weights[1], 0.25, 1e-6);

  RouterConfig config = config_of(4, 2, ScoreFunction::softmax, WeightNorm::sum_to_one);
  config.scale = 3.0F;
  Router renormalised(config);
  routed = route_logits(renormalised, logits);
  EXPECT_NEAR(routed.weights[0], 2.0, 1e-6);
  EXPECT_NEAR(routed.weights[1], 1.0, 1e-6);
}

TEST(RouterForward, SigmoidByHand) {
  // Scores 1/2, 3/4, 1/4.
  const std::vector<float> logits{0.0F, std::log(3.0F), -std::log(3.0F)};
  Router plain(config_of(3, 2, ScoreFunction::sigmoid, WeightNorm::none));
  Routed routed = route_logits(plain, logits);
  EXPECT_EQ(routed.ids, (std::vector<std::int32_t>{1, 0}));
  EXPECT_NEAR(routed.weights[0], 0.75, 1e-6);
  EXPECT_NEAR(routed.weights[1], 0.5, 1e-6);
  Router renormalised(config_of(3, 2, ScoreFunction::sigmoid, WeightNorm::sum_to_one));
  routed = route_logits(renormalised, logits);
  EXPECT_NEAR(routed.weights[0], 0.6, 1e-6);
  EXPECT_NEAR(routed.weights[1], 0.4, 1e-6);
}

TEST(RouterForward, EveryCombinationAgreesWithTheNaiveRouter) {
  constexpr std::int64_t kTokens = 200;
  std::mt19937 generator(1);
  for (const RouterConfig& config : testing::all_router_configs()) {
    const std::int64_t experts = config.num_experts;
    Router router(config);
    for (const bool with_bias : {false, true}) {
      for (const DType dtype : {DType::fp32, DType::bf16}) {
        SCOPED_TRACE(testing::name_of(config) + (with_bias ? ", bias" : "") + ", " +
                     to_string(dtype));
        std::vector<float> logits = testing::random_floats(generator, kTokens * experts, -4, 4);
        const std::vector<bf16> rounded = testing::to_bf16_vector(logits);
        std::vector<float> bias;
        if (with_bias) bias = testing::random_floats(generator, experts, -0.5, 0.5);
        RouterInputs inputs;
        inputs.logits = tensor_view(logits.data(), {kTokens, experts});
        if (dtype == DType::bf16) {
          inputs.logits = tensor_view(rounded.data(), {kTokens, experts});
          std::transform(rounded.begin(), rounded.end(), logits.begin(),
                         [](bf16 value) { return to_float(value); });
        }
        if (with_bias) inputs.selection_bias = tensor_view(bias.data(), {experts});
        const Routed routed = route(router, inputs);
        const std::vector<float> scores = scores_of(routed.context);
        for (std::int64_t t = 0; t < kTokens; ++t) {
          const testing::NaiveToken naive = testing::naive_route(
              config, {logits.begin() + t * experts, logits.begin() + (t + 1) * experts}, bias);
          for (std::int64_t k = 0; k < config.top_k; ++k) {
            const auto slot = static_cast<std::size_t>(t * config.top_k + k);
            ASSERT_EQ(routed.ids[slot], naive.ids[static_cast<std::size_t>(k)]) << "token " << t;
            ASSERT_NEAR(routed.weights[slot], naive.weights[static_cast<std::size_t>(k)], 2e-6);
          }
          for (std::int64_t j = 0; j < experts; ++j) {
            ASSERT_NEAR(scores[static_cast<std::size_t>(t * experts + j)],
                        naive.scores[static_cast<std::size_t>(j)], 1e-6);
          }
        }
      }
    }
  }
}

TEST(RouterForward, TiesGoToTheLowerId) {
  for (const RouterConfig& config : testing::all_router_configs()) {
    SCOPED_TRACE(testing::name_of(config));
    Router router(config);
    const Routed routed = route_logits(router, std::vector<float>(12, 0.75F));
    EXPECT_EQ(routed.ids, (std::vector<std::int32_t>{0, 1, 2, 3}));
  }
}

TEST(RouterForward, GroupMaskIsBelowEveryNegativeScore) {
  // Two groups of three. All biased scores are negative; a mask of 0 would select from group 0.
  RouterConfig config = config_of(6, 3, ScoreFunction::sigmoid, WeightNorm::none);
  config.num_groups = 2;
  config.top_groups = 1;
  Router router(config);
  const std::vector<float> logits(6, 0.0F);
  const std::vector<float> bias{-3.0F, -3.0F, -3.0F, -2.0F, -2.5F, -9.0F};
  RouterInputs inputs;
  inputs.logits = tensor_view(logits.data(), {1, 6});
  inputs.selection_bias = tensor_view(bias.data(), {6});
  const Routed routed = route(router, inputs);
  EXPECT_EQ(routed.ids, (std::vector<std::int32_t>{3, 4, 5}));
  for (const float weight : routed.weights) EXPECT_EQ(weight, 0.5F);  // no bias in the weights
}

TEST(RouterForward, GroupsWhoseBiasesOverflowTogetherAreMaskedToo) {
  RouterConfig config;
  config.num_experts = 4;
  config.top_k = 2;
  config.num_groups = 2;
  config.top_groups = 1;
  Router router(config);
  const std::vector<float> logits(4, 0.0F);
  const std::vector<float> bias = {-1e38F, -3e38F, 0.0F, -3.3e38F};  // -4e38 is -infinity in fp32
  RouterInputs inputs;
  inputs.logits = tensor_view(logits.data(), {1, 4});
  inputs.selection_bias = tensor_view(bias.data(), {4});
  EXPECT_EQ(route(router, inputs).ids, (std::vector<std::int32_t>{2, 3}));
}

TEST(RouterForward, GroupScoreIsTheSumOfTheTwoHighest) {
  // Group 0 has the best expert (0.9 + 0.1), group 1 the best pair (0.7 + 0.6), group 2 the best
  // sum of all three (0.5 + 0.5 + 0.5).
  RouterConfig config = config_of(9, 2, ScoreFunction::sigmoid, WeightNorm::none);
  config.num_groups = 3;
  config.top_groups = 1;
  Router router(config);
  std::vector<float> logits;
  for (const double score : {0.9, 0.1, 0.1, 0.7, 0.05, 0.6, 0.5, 0.5, 0.5}) {
    logits.push_back(static_cast<float>(std::log(score / (1 - score))));
  }
  EXPECT_EQ(route_logits(router, logits).ids, (std::vector<std::int32_t>{3, 5}));
}

TEST(RouterForward, LogitsAreOneIncreasingFmaChain) {
  constexpr std::int64_t kTokens = 7;
  constexpr std::int64_t kHidden = 67;
  constexpr std::int64_t kExperts = 21;
  std::mt19937 generator(2);
  const std::vector<bf16> x =
      testing::to_bf16_vector(testing::random_floats(generator, kTokens * kHidden, -1, 1));
  const std::vector<float> weight = testing::random_floats(generator, kExperts * kHidden, -1, 1);
  const std::vector<bf16> weight_bf16 = testing::to_bf16_vector(weight);
  Router router(config_of(kExperts, 3, ScoreFunction::sigmoid, WeightNorm::none));
  for (const DType dtype : {DType::fp32, DType::bf16}) {
    std::vector<float> logits;
    for (std::int64_t t = 0; t < kTokens; ++t) {
      for (std::int64_t j = 0; j < kExperts; ++j) {
        float sum = 0;
        for (std::int64_t h = 0; h < kHidden; ++h) {
          const auto at = static_cast<std::size_t>(j * kHidden + h);
          sum = std::fma(to_float(x[static_cast<std::size_t>(t * kHidden + h)]),
                         dtype == DType::fp32 ? weight[at] : to_float(weight_bf16[at]), sum);
        }
        logits.push_back(sum);
      }
    }
    RouterInputs inputs;
    inputs.x = tensor_view(x.data(), {kTokens, kHidden});
    inputs.router_weight = tensor_view(weight.data(), {kExperts, kHidden});
    if (dtype == DType::bf16) {
      inputs.router_weight = tensor_view(weight_bf16.data(), {kExperts, kHidden});
    }
    const Routed routed = route(router, inputs);
    const Routed expected = route_logits(router, logits);
    EXPECT_EQ(scores_of(routed.context), scores_of(expected.context)) << to_string(dtype);
    EXPECT_EQ(routed.ids, expected.ids);
    EXPECT_EQ(routed.weights, expected.weights);
  }
}

TEST(RouterForward, ReadsAndWritesStridedRows) {
  std::mt19937 generator(3);
  Router router(config_of(4, 2, ScoreFunction::softmax, WeightNorm::sum_to_one));
  const std::vector<float> wide = testing::random_floats(generator, 3 * 9, -2, 2);
  std::vector<float> packed;
  for (std::size_t t = 0; t < 3; ++t) {
    packed.insert(packed.end(), wide.begin() + static_cast<std::ptrdiff_t>(t * 9),
                  wide.begin() + static_cast<std::ptrdiff_t>(t * 9 + 4));
  }
  const Routed expected = route_logits(router, packed);

  RouterInputs inputs;
  inputs.logits = tensor_view(wide.data(), {3, 4});
  inputs.logits.strides[0] = 9;
  std::vector<std::int32_t> ids(3 * 5, -7);
  std::vector<float> weights(3 * 5, -7.0F);
  RouterOutputs outputs{tensor_view(ids.data(), {3, 2}), tensor_view(weights.data(), {3, 2})};
  outputs.expert_ids.strides[0] = 5;
  outputs.weights.strides[0] = 5;
  RouterContext context;
  router.forward(inputs, outputs, context);
  for (std::size_t t = 0; t < 3; ++t) {
    for (std::size_t k = 0; k < 5; ++k) {
      EXPECT_EQ(ids[t * 5 + k], k < 2 ? expected.ids[t * 2 + k] : -7);
      EXPECT_EQ(weights[t * 5 + k], k < 2 ? expected.weights[t * 2 + k] : -7.0F);
    }
  }
}

TEST(RouterForward, ForcedIdsHaveHolesAndDuplicates) {
  const std::vector<float> logits{0.0F, std::log(4.0F), std::log(2.0F), 0.0F,  // 1/8 4/8 2/8 1/8
                                  0.0F, 0.0F,           0.0F,           0.0F};
  const std::vector<std::int32_t> forced{-1, 2, 1, 2, -1, -1, -1, -1, -1, -1};
  RouterInputs inputs;
  inputs.logits = tensor_view(logits.data(), {2, 4});
  inputs.forced_ids = tensor_view(forced.data(), {2, 5});  // K may exceed top_k, and even E
  for (const ScoreFunction function : {ScoreFunction::softmax, ScoreFunction::sigmoid}) {
    Router router(config_of(4, 1, function, WeightNorm::sum_to_one));
    const Routed routed = route(router, inputs);
    EXPECT_EQ(routed.ids, forced);
    const double s1 = function == ScoreFunction::softmax ? 0.5 : 0.8;
    const double s2 = function == ScoreFunction::softmax ? 0.25 : 2.0 / 3.0;
    const double sum = s1 + 2 * s2;
    const std::vector<double> expected{0, s2 / sum, s1 / sum, s2 / sum, 0, 0, 0, 0, 0, 0};
    for (std::size_t slot = 0; slot < expected.size(); ++slot) {
      EXPECT_NEAR(routed.weights[slot], expected[slot], 1e-6);
      if (forced[slot] < 0) {
        EXPECT_EQ(routed.weights[slot], 0.0F);
      }
    }
  }
}

TEST(RouterForward, RenormalisedWeightsSurviveVanishingScores) {
  // The softmax scores of experts 1 and 2 are 0 in fp32; their ratio is known all the same.
  Router router(config_of(3, 2, ScoreFunction::softmax, WeightNorm::sum_to_one));
  const std::vector<float> logits{0.0F, -200.0F, -200.0F + std::log(3.0F)};
  const std::vector<std::int32_t> forced{1, 2};
  RouterInputs inputs;
  inputs.logits = tensor_view(logits.data(), {1, 3});
  inputs.forced_ids = tensor_view(forced.data(), {1, 2});
  const Routed routed = route(router, inputs);
  EXPECT_NEAR(routed.weights[0], 0.25, 1e-5);
  EXPECT_NEAR(routed.weights[1], 0.75, 1e-5);
}

TEST(RouterForward, ExtremeLogitsStayFinite) {
  for (const RouterConfig& config : testing::all_router_configs()) {
    Router router(config);
    std::vector<float> logits(12, -3e38F);
    logits[5] = 3e38F;
    const Routed routed = route_logits(router, logits);
    EXPECT_EQ(routed.ids[0], 5);
    for (const float weight : routed.weights) EXPECT_TRUE(std::isfinite(weight));
  }
}

TEST(RouterForward, IdsOfAnEarlierForwardRepeatItBitForBit) {
  std::mt19937 generator(4);
  for (const RouterConfig& config : testing::all_router_configs()) {
    Router router(config);
    std::vector<float> logits = testing::random_floats(generator, 50 * 12, -3, 3);
    std::fill(logits.begin(), logits.begin() + 12 * 5, 1.0F);  // some ties
    const std::vector<float> bias = testing::random_floats(generator, 12, -0.1, 0.1);
    RouterInputs inputs;
    inputs.logits = tensor_view(logits.data(), {50, 12});
    inputs.selection_bias = tensor_view(bias.data(), {12});
    Routed first = route(router, inputs);
    inputs.selection_bias = {};
    inputs.forced_ids = first.context.expert_ids();
    const Routed second = route(router, inputs);
    EXPECT_EQ(first.ids, second.ids);
    EXPECT_EQ(first.weights, second.weights);
    // Into the very context that holds the ids, too.
    router.forward(
        inputs,
        {tensor_view(first.ids.data(), {50, 4}), tensor_view(first.weights.data(), {50, 4})},
        first.context);
    EXPECT_EQ(first.ids, second.ids);
    EXPECT_EQ(first.weights, second.weights);
  }
}

TEST(RouterForward, NoTokens) {
  Router router(config_of(4, 2, ScoreFunction::softmax, WeightNorm::sum_to_one));
  const float* none = nullptr;
  RouterInputs inputs;
  inputs.logits = tensor_view(none, {0, 4});
  Routed routed = route(router, inputs);
  EXPECT_TRUE(routed.context.ready());
  EXPECT_EQ(routed.context.num_tokens(), 0);

  const std::vector<float> weight(4 * 3, 1.0F);
  inputs = {};
  inputs.x = tensor_view(static_cast<const bf16*>(nullptr), {0, 3});
  inputs.router_weight = tensor_view(weight.data(), {4, 3});
  routed = route(router, inputs);
  std::vector<float> d_weight(4 * 3, 5.0F);
  RouterBackwardInputs backward_inputs;
  backward_inputs.d_weights = tensor_view(none, {0, 2});
  backward_inputs.x = inputs.x;
  RouterBackwardOutputs outputs;
  outputs.d_router_weight = tensor_view(d_weight.data(), {4, 3});
  outputs.d_router_weight_write = GradWrite::accumulate;
  router.backward(routed.context, backward_inputs, outputs);
  EXPECT_EQ(d_weight, std::vector<float>(4 * 3, 5.0F));
  outputs.d_router_weight_write = GradWrite::store;
  router.backward(routed.context, backward_inputs, outputs);
  EXPECT_EQ(d_weight, std::vector<float>(4 * 3, 0.0F));
}

}  // namespace
}  // namespace megamoe
