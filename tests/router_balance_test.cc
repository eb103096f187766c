// Load statistics, the auxiliary loss over ranks, and bias-based balancing.
#include <gtest/gtest.h>

#include <cmath>

#include "megamoe/error.h"
#include "megamoe/router.h"
#include "router_fixture.h"
#include "router_naive.h"

namespace megamoe {
namespace {

using testing::Routed;

TEST(RouterLoad, CountsSlotsAndSumsScoresByHand) {
  RouterConfig config;
  config.num_experts = 2;
  config.score_function = ScoreFunction::sigmoid;
  config.aux_loss_alpha = 0.5F;
  Router router(config);
  // Scores (1/2, 1/2) and (1/4, 3/4): shares of the token's sum are the same numbers.
  const std::vector<float> logits{0.0F, 0.0F, -std::log(3.0F), std::log(3.0F)};
  const std::vector<std::int32_t> ids{0, -1, 1, 1};
  RouterInputs inputs;
  inputs.logits = tensor_view(logits.data(), {2, 2});
  inputs.forced_ids = tensor_view(ids.data(), {2, 2});
  const Routed routed = testing::route(router, inputs);
  RouterLoad load(2);
  router.add_load(routed.context, load);
  EXPECT_EQ(load.count(0), 1);
  EXPECT_EQ(load.count(1), 2);
  EXPECT_EQ(load.num_slots(), 3);
  EXPECT_EQ(load.num_tokens(), 2);
  EXPECT_NEAR(load.score_sum(0), 0.75, 1e-6);
  EXPECT_NEAR(load.score_sum(1), 1.25, 1e-6);
  EXPECT_NEAR(load.max_over_mean(), 4.0 / 3.0, 1e-12);
  EXPECT_NEAR(router.aux_loss(load), 0.5 * 2 * (0.375 / 3 + 0.625 * 2 / 3), 1e-6);
  router.add_load(routed.context, load);  // adds; the loss of the doubled batch is the same
  EXPECT_EQ(load.count(1), 4);
  EXPECT_NEAR(router.aux_loss(load), 0.5 * 2 * (0.375 / 3 + 0.625 * 2 / 3), 1e-6);
  load.clear();
  EXPECT_EQ(load.num_slots(), 0);
  EXPECT_EQ(load.max_over_mean(), 0.0);
  EXPECT_EQ(router.aux_loss(load), 0.0);
}

TEST(RouterLoad, BalancedLoadCostsAlpha) {
  RouterConfig config;
  config.num_experts = 4;
  config.aux_loss_alpha = 0.25F;
  Router router(config);
  const std::vector<float> logits(4 * 4, 1.0F);
  const std::vector<std::int32_t> ids{0, 1, 2, 3};
  RouterInputs inputs;
  inputs.logits = tensor_view(logits.data(), {4, 4});
  inputs.forced_ids = tensor_view(ids.data(), {4, 1});
  const Routed routed = testing::route(router, inputs);
  RouterLoad load(4);
  router.add_load(routed.context, load);
  EXPECT_NEAR(router.aux_loss(load), 0.25, 1e-7);
  EXPECT_EQ(load.max_over_mean(), 1.0);
}

/// Everything a rank computes from its part of the batch.
struct RankResult {
  Routed routed;
  RouterLoad load;
  std::vector<float> d_logits;
  std::vector<float> d_router_weight;
};

TEST(RouterLoad, TheSumOverRanksIsTheGlobalBatch) {
  constexpr std::int64_t kTokens = 41;
  constexpr std::int64_t kHidden = 16;
  std::mt19937 generator(21);
  for (RouterConfig config : testing::all_router_configs()) {
    SCOPED_TRACE(testing::name_of(config));
    config.aux_loss_alpha = 0.1F;
    const std::int64_t experts = config.num_experts;
    const std::vector<bf16> x =
        testing::to_bf16_vector(testing::random_floats(generator, kTokens * kHidden, -1, 1));
    const std::vector<float> weight = testing::random_floats(generator, experts * kHidden, -1, 1);
    const std::vector<float> d_weights =
        testing::random_floats(generator, kTokens * config.top_k, -1, 1);

    const auto run = [&](const std::vector<std::int64_t>& tokens_of_rank) {
      std::vector<RankResult> results;
      RouterLoad global(experts);
      std::vector<Router> routers;
      std::vector<RouterInputs> inputs;
      std::int64_t first = 0;
      for (const std::int64_t tokens : tokens_of_rank) {
        routers.emplace_back(config);
        RouterInputs rank_inputs;
        rank_inputs.x = tensor_view(x.data() + first * kHidden, {tokens, kHidden});
        rank_inputs.router_weight = tensor_view(weight.data(), {experts, kHidden});
        inputs.push_back(rank_inputs);
        RankResult result{testing::route(routers.back(), rank_inputs), RouterLoad(experts), {}, {}};
        routers.back().add_load(result.routed.context, result.load);
        global += result.load;
        results.push_back(std::move(result));
        first += tokens;
      }
      first = 0;
      for (std::size_t rank = 0; rank < results.size(); ++rank) {
        const std::int64_t tokens = tokens_of_rank[rank];
        RankResult& result = results[rank];
        result.d_logits.resize(static_cast<std::size_t>(tokens * experts));
        result.d_router_weight.resize(static_cast<std::size_t>(experts * kHidden));
        RouterBackwardInputs backward_inputs;
        backward_inputs.d_weights =
            tensor_view(d_weights.data() + first * config.top_k, {tokens, config.top_k});
        backward_inputs.x = inputs[rank].x;
        backward_inputs.global_load = &global;
        RouterBackwardOutputs outputs;
        outputs.d_logits = tensor_view(result.d_logits.data(), {tokens, experts});
        outputs.d_router_weight = tensor_view(result.d_router_weight.data(), {experts, kHidden});
        routers[rank].backward(result.routed.context, backward_inputs, outputs);
        first += tokens;
      }
      return std::pair(std::move(results), std::move(global));
    };

    const auto [whole, whole_load] = run({kTokens});
    const auto [parts, parts_load] = run({13, 0, 28});
    std::vector<std::int32_t> ids;
    std::vector<float> weights;
    std::vector<float> d_logits;
    std::vector<float> d_router_weight(whole[0].d_router_weight.size(), 0.0F);
    for (const RankResult& part : parts) {
      ids.insert(ids.end(), part.routed.ids.begin(), part.routed.ids.end());
      weights.insert(weights.end(), part.routed.weights.begin(), part.routed.weights.end());
      d_logits.insert(d_logits.end(), part.d_logits.begin(), part.d_logits.end());
      for (std::size_t i = 0; i < d_router_weight.size(); ++i) {
        d_router_weight[i] += part.d_router_weight[i];
      }
    }
    EXPECT_EQ(ids, whole[0].routed.ids);
    EXPECT_EQ(weights, whole[0].routed.weights);
    EXPECT_EQ(d_logits, whole[0].d_logits);  // bitwise: only exact counts enter the slopes
    for (std::size_t i = 0; i < d_router_weight.size(); ++i) {
      EXPECT_NEAR(d_router_weight[i], whole[0].d_router_weight[i], 1e-5);
    }
    for (std::int64_t j = 0; j < experts; ++j) {
      EXPECT_EQ(parts_load.count(j), whole_load.count(j));
      EXPECT_NEAR(parts_load.score_sum(j), whole_load.score_sum(j), 1e-12);
    }
    EXPECT_EQ(parts_load.num_tokens(), kTokens);
    EXPECT_NEAR(Router(config).aux_loss(parts_load), Router(config).aux_loss(whole_load), 1e-12);
  }
}

TEST(SelectionBias, MovesByTheSignOfTheLoad) {
  RouterLoad load(4);
  load.values()[0] = 2;  // the mean
  load.values()[1] = 5;
  load.values()[3] = 1;
  std::vector<float> bias{1.0F, 1.0F, 1.0F, 1.0F};
  update_selection_bias(load, 0.25F, tensor_view(bias.data(), {4}));
  EXPECT_EQ(bias, (std::vector<float>{1.0F, 0.75F, 1.25F, 1.25F}));
  load.clear();
  update_selection_bias(load, 0.25F, tensor_view(bias.data(), {4}));
  EXPECT_EQ(bias, (std::vector<float>{1.0F, 0.75F, 1.25F, 1.25F}));
}

TEST(SelectionBias, ThirdsAreComparedExactly) {
  RouterLoad load(3);  // the mean is 1/3 slot
  load.values()[1] = 1;
  std::vector<float> bias(3, 0.0F);
  update_selection_bias(load, 1.0F, tensor_view(bias.data(), {3}));
  EXPECT_EQ(bias, (std::vector<float>{1.0F, -1.0F, 1.0F}));
}

/// Tokens that prefer low ids strongly, new ones each step.
std::vector<float> skewed_logits(std::mt19937& generator, std::int64_t tokens,
                                 std::int64_t experts) {
  std::vector<float> logits = testing::random_floats(generator, tokens * experts, -1, 1);
  for (std::int64_t i = 0; i < tokens * experts; ++i) {
    logits[static_cast<std::size_t>(i)] -= 0.25F * static_cast<float>(i % experts);
  }
  return logits;
}

TEST(SelectionBias, BalancesASkewedRouter) {
  constexpr std::int64_t kTokens = 512;
  RouterConfig config;
  config.num_experts = 8;
  config.top_k = 2;
  config.score_function = ScoreFunction::sigmoid;
  Router router(config);
  std::vector<float> bias(8, 0.0F);
  std::mt19937 generator(22);
  double first = 0;
  double last = 0;
  for (int step = 0; step < 200; ++step) {
    const std::vector<float> logits = skewed_logits(generator, kTokens, 8);
    RouterInputs inputs;
    inputs.logits = tensor_view(logits.data(), {kTokens, 8});
    inputs.selection_bias = tensor_view(static_cast<const float*>(bias.data()), {8});
    const Routed routed = testing::route(router, inputs);
    RouterLoad load(8);
    router.add_load(routed.context, load);
    if (step == 0) first = load.max_over_mean();
    last = load.max_over_mean();
    update_selection_bias(load, 0.01F, tensor_view(bias.data(), {8}));
  }
  EXPECT_GT(first, 2.0);
  EXPECT_LT(last, 1.3);
}

TEST(AuxiliaryLoss, BalancesASkewedRouter) {
  constexpr std::int64_t kTokens = 512;
  RouterConfig config;
  config.num_experts = 8;
  config.top_k = 2;
  config.aux_loss_alpha = 1.0F;
  Router router(config);
  std::vector<float> offsets(8, 0.0F);  // trained: added to every token's logits
  std::mt19937 generator(23);
  double first = 0;
  double last = 0;
  for (int step = 0; step < 200; ++step) {
    std::vector<float> logits = skewed_logits(generator, kTokens, 8);
    for (std::size_t i = 0; i < logits.size(); ++i) logits[i] += offsets[i % 8];
    const Routed routed = testing::route_logits(router, logits);
    RouterLoad load(8);
    router.add_load(routed.context, load);
    if (step == 0) first = load.max_over_mean();
    last = load.max_over_mean();
    const std::vector<float> d_weights(kTokens * 2, 0.0F);
    std::vector<float> d_logits(logits.size());
    RouterBackwardInputs inputs;
    inputs.d_weights = tensor_view(d_weights.data(), {kTokens, 2});
    inputs.global_load = &load;
    RouterBackwardOutputs outputs;
    outputs.d_logits = tensor_view(d_logits.data(), {kTokens, 8});
    router.backward(routed.context, inputs, outputs);
    for (std::size_t i = 0; i < logits.size(); ++i) offsets[i % 8] -= 0.5F * d_logits[i];
  }
  EXPECT_GT(first, 2.0);
  EXPECT_LT(last, 1.3);
}

}  // namespace
}  // namespace megamoe
