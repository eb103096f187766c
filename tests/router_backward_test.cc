// The router's gradients: finite differences in fp64 against an independent router, then the fp32
// router against the fp64 gradients.
#include <gtest/gtest.h>

#include <cmath>

#include "megamoe/router.h"
#include "router_fixture.h"
#include "router_naive.h"
#include "routing/router_token.h"

namespace megamoe {
namespace {

using testing::Routed;

constexpr std::int64_t kTokens = 5;

/// A batch with one loss: <coefficients, weights> + d_aux_loss * aux loss, at fixed ids.
struct Problem {
  RouterConfig config;
  std::vector<std::vector<double>> logits_TE;
  std::vector<std::vector<int>> ids_TK;
  std::vector<std::vector<double>> d_weights_TK;
  double d_aux_loss = 0.75;

  /// f_j of the auxiliary loss.
  [[nodiscard]] std::vector<double> slot_shares() const {
    std::vector<double> shares(static_cast<std::size_t>(config.num_experts), 0.0);
    double slots = 0;
    for (const auto& ids : ids_TK) {
      for (const int id : ids) {
        if (id < 0) continue;
        shares[static_cast<std::size_t>(id)] += 1;
        slots += 1;
      }
    }
    for (double& share : shares) share /= slots;
    return shares;
  }

  [[nodiscard]] double loss() const {
    double sum = d_aux_loss * testing::naive_aux_loss(config, logits_TE, slot_shares());
    for (std::size_t t = 0; t < logits_TE.size(); ++t) {
      const auto token = testing::naive_weights(config, logits_TE[t], ids_TK[t]);
      for (std::size_t k = 0; k < ids_TK[t].size(); ++k) {
        sum += d_weights_TK[t][k] * token.weights[k];
      }
    }
    return sum;
  }

  [[nodiscard]] RouterLoad load() const {
    RouterLoad load(config.num_experts);
    for (const auto& ids : ids_TK) {
      for (const int id : ids) {
        if (id >= 0) load.values()[static_cast<std::size_t>(id)] += 1;
      }
    }
    load.values().back() = static_cast<double>(logits_TE.size());
    return load;
  }
};

enum class Ids { selected, holes_and_duplicates };

Problem make_problem(const RouterConfig& config, Ids kind, std::mt19937& generator) {
  Problem problem;
  problem.config = config;
  for (std::int64_t t = 0; t < kTokens; ++t) {
    std::vector<double> logits;
    for (std::int64_t j = 0; j < config.num_experts; ++j) {
      logits.push_back(static_cast<double>(static_cast<float>(testing::uniform(generator, -2, 2))));
    }
    std::vector<int> ids = testing::naive_route(config, logits, {}).ids;
    if (kind == Ids::holes_and_duplicates) {
      ids[3] = ids[1];
      ids[static_cast<std::size_t>(t) % 4] = -1;
      if (t == 4) ids = {-1, -1, -1, -1};
    }
    problem.ids_TK.push_back(ids);
    problem.logits_TE.push_back(logits);
    std::vector<double> d_weights;
    for (std::size_t k = 0; k < ids.size(); ++k) {
      d_weights.push_back(
          static_cast<double>(static_cast<float>(testing::uniform(generator, -1, 1))));
    }
    problem.d_weights_TK.push_back(d_weights);
  }
  return problem;
}

/// The library's formulas in fp64.
std::vector<double> analytic_gradient(const Problem& problem) {
  const RouterConfig& config = problem.config;
  const auto experts = static_cast<std::size_t>(config.num_experts);
  std::vector<double> slopes;
  if (config.aux_loss_alpha > 0) {
    slopes.resize(experts);
    detail::compute_aux_slopes<double>(config, problem.load(), problem.d_aux_loss, slopes);
  }
  std::vector<double> gradient;
  for (std::size_t t = 0; t < problem.logits_TE.size(); ++t) {
    const std::vector<std::int32_t> ids(problem.ids_TK[t].begin(), problem.ids_TK[t].end());
    std::vector<double> scores(experts);
    std::vector<double> shares(ids.size());
    std::vector<double> d_logits(experts);
    detail::compute_scores<double>(config.score_function, problem.logits_TE[t], scores);
    detail::compute_shares<double>(config, problem.logits_TE[t], scores, ids, shares);
    detail::token_backward<double>(config, {scores, ids, shares}, problem.d_weights_TK[t], slopes,
                                   d_logits);
    gradient.insert(gradient.end(), d_logits.begin(), d_logits.end());
  }
  return gradient;
}

std::vector<double> numeric_gradient(Problem problem) {
  constexpr double kStep = 1e-5;
  std::vector<double> gradient;
  for (auto& logits : problem.logits_TE) {
    for (double& logit : logits) {
      const double saved = logit;
      logit = saved + kStep;
      const double above = problem.loss();
      logit = saved - kStep;
      const double below = problem.loss();
      logit = saved;
      gradient.push_back((above - below) / (2 * kStep));
    }
  }
  return gradient;
}

/// The same problem through the public router in fp32.
struct Fp32Run {
  Routed routed;
  std::vector<float> d_logits;
};

Fp32Run run_fp32(const Problem& problem, Router& router) {
  std::vector<float> logits;
  std::vector<std::int32_t> ids;
  std::vector<float> d_weights;
  for (std::size_t t = 0; t < problem.logits_TE.size(); ++t) {
    for (const double value : problem.logits_TE[t]) logits.push_back(static_cast<float>(value));
    for (const int id : problem.ids_TK[t]) ids.push_back(id);
    for (std::size_t k = 0; k < problem.ids_TK[t].size(); ++k) {
      // What lies in the gradient of an empty slot must not matter.
      d_weights.push_back(problem.ids_TK[t][k] < 0
                              ? std::nanf("")
                              : static_cast<float>(problem.d_weights_TK[t][k]));
    }
  }
  const std::int64_t experts = problem.config.num_experts;
  RouterInputs inputs;
  inputs.logits = tensor_view(static_cast<const float*>(logits.data()), {kTokens, experts});
  inputs.forced_ids = tensor_view(static_cast<const std::int32_t*>(ids.data()), {kTokens, 4});
  Fp32Run run{testing::route(router, inputs), std::vector<float>(logits.size(), 9.0F)};
  RouterLoad load(experts);
  router.add_load(run.routed.context, load);
  RouterBackwardInputs backward_inputs;
  backward_inputs.d_weights =
      tensor_view(static_cast<const float*>(d_weights.data()), {kTokens, 4});
  backward_inputs.global_load = &load;
  backward_inputs.d_aux_loss = static_cast<float>(problem.d_aux_loss);
  RouterBackwardOutputs outputs;
  outputs.d_logits = tensor_view(run.d_logits.data(), {kTokens, experts});
  router.backward(run.routed.context, backward_inputs, outputs);
  return run;
}

TEST(RouterBackward, GradientsAgreeWithFiniteDifferences) {
  std::mt19937 generator(11);
  for (RouterConfig config : testing::all_router_configs()) {
    for (const float alpha : {0.0F, 0.5F}) {
      for (const Ids kind : {Ids::selected, Ids::holes_and_duplicates}) {
        SCOPED_TRACE(testing::name_of(config) + ", alpha " + std::to_string(alpha) +
                     (kind == Ids::selected ? "" : ", holes and duplicates"));
        config.aux_loss_alpha = alpha;
        const Problem problem = make_problem(config, kind, generator);
        const std::vector<double> analytic = analytic_gradient(problem);
        const std::vector<double> numeric = numeric_gradient(problem);
        Router router(config);
        const Fp32Run fp32 = run_fp32(problem, router);
        double largest = 0;
        for (std::size_t i = 0; i < analytic.size(); ++i) {
          ASSERT_NEAR(analytic[i], numeric[i], 1e-9) << "logit " << i;
          ASSERT_NEAR(static_cast<double>(fp32.d_logits[i]), analytic[i], 2e-6) << "logit " << i;
          largest = std::max(largest, std::abs(analytic[i]));
        }
        EXPECT_GT(largest, 1e-2);
      }
    }
  }
}

TEST(RouterBackward, AuxiliaryLossAloneMovesEveryLogit) {
  std::mt19937 generator(12);
  for (RouterConfig config : testing::all_router_configs()) {
    SCOPED_TRACE(testing::name_of(config));
    config.aux_loss_alpha = 1.0F;
    Problem problem = make_problem(config, Ids::selected, generator);
    for (auto& d_weights : problem.d_weights_TK) d_weights.assign(4, 0.0);
    Router router(config);
    const Fp32Run run = run_fp32(problem, router);
    RouterLoad load(config.num_experts);
    router.add_load(run.routed.context, load);
    EXPECT_NEAR(router.aux_loss(load),
                testing::naive_aux_loss(config, problem.logits_TE, problem.slot_shares()), 1e-6);
    for (const float gradient : run.d_logits) EXPECT_NE(gradient, 0.0F);
  }
}

TEST(RouterBackward, EmptyAndUnselectedExpertsGetExactZeros) {
  std::mt19937 generator(13);
  for (const RouterConfig& config : testing::all_router_configs()) {
    if (config.score_function == ScoreFunction::softmax && config.weight_norm == WeightNorm::none) {
      continue;  // there every score depends on every logit
    }
    SCOPED_TRACE(testing::name_of(config));
    const Problem problem = make_problem(config, Ids::holes_and_duplicates, generator);
    Router router(config);
    const Fp32Run run = run_fp32(problem, router);
    for (std::size_t t = 0; t < problem.ids_TK.size(); ++t) {
      for (int j = 0; j < 12; ++j) {
        const auto& ids = problem.ids_TK[t];
        if (std::count(ids.begin(), ids.end(), j) > 0) continue;
        EXPECT_EQ(run.d_logits[t * 12 + static_cast<std::size_t>(j)], 0.0F);
      }
    }
  }
}

TEST(RouterBackward, DuplicatesGetBothGradients) {
  // sigmoid(0) = 1/2, so each slot gives scale * d_weight / 4.
  RouterConfig config;
  config.num_experts = 2;
  config.score_function = ScoreFunction::sigmoid;
  config.scale = 2.0F;
  Router router(config);
  const std::vector<float> logits{0.0F, 0.0F};
  const std::vector<std::int32_t> ids{1, -1, 1};
  const std::vector<float> d_weights{3.0F, 100.0F, 5.0F};
  RouterInputs inputs;
  inputs.logits = tensor_view(logits.data(), {1, 2});
  inputs.forced_ids = tensor_view(ids.data(), {1, 3});
  const Routed routed = testing::route(router, inputs);
  std::vector<float> d_logits(2, -1.0F);
  RouterBackwardInputs backward_inputs;
  backward_inputs.d_weights = tensor_view(d_weights.data(), {1, 3});
  RouterBackwardOutputs outputs;
  outputs.d_logits = tensor_view(d_logits.data(), {1, 2});
  router.backward(routed.context, backward_inputs, outputs);
  EXPECT_EQ(d_logits, (std::vector<float>{0.0F, 4.0F}));
}

TEST(RouterBackward, InputAndWeightGradientsAreFmaChains) {
  constexpr std::int64_t kHidden = 37;
  std::mt19937 generator(14);
  for (RouterConfig config : testing::all_router_configs()) {
    for (const float alpha : {0.0F, 0.5F}) {
      for (const DType dtype : {DType::fp32, DType::bf16}) {
        config.aux_loss_alpha = alpha;
        const std::int64_t experts = config.num_experts;
        Router router(config);
        const std::vector<bf16> x =
            testing::to_bf16_vector(testing::random_floats(generator, kTokens * kHidden, -1, 1));
        std::vector<float> weight = testing::random_floats(generator, experts * kHidden, -1, 1);
        const std::vector<bf16> weight_bf16 = testing::to_bf16_vector(weight);
        RouterInputs inputs;
        inputs.x = tensor_view(x.data(), {kTokens, kHidden});
        inputs.router_weight =
            tensor_view(static_cast<const float*>(weight.data()), {experts, kHidden});
        if (dtype == DType::bf16) {
          inputs.router_weight = tensor_view(weight_bf16.data(), {experts, kHidden});
          std::transform(weight_bf16.begin(), weight_bf16.end(), weight.begin(),
                         [](bf16 value) { return to_float(value); });
        }
        const Routed routed = testing::route(router, inputs);
        RouterLoad load(experts);
        router.add_load(routed.context, load);
        const std::vector<float> d_weights =
            testing::random_floats(generator, kTokens * config.top_k, -1, 1);
        RouterBackwardInputs backward_inputs;
        backward_inputs.d_weights = tensor_view(d_weights.data(), {kTokens, config.top_k});
        backward_inputs.x = inputs.x;
        backward_inputs.router_weight = inputs.router_weight;
        backward_inputs.global_load = &load;
        std::vector<float> d_logits(static_cast<std::size_t>(kTokens * experts));
        std::vector<float> d_x(static_cast<std::size_t>(kTokens * kHidden), 3.0F);
        std::vector<float> d_router_weight(static_cast<std::size_t>(experts * kHidden), 3.0F);
        RouterBackwardOutputs outputs;
        outputs.d_logits = tensor_view(d_logits.data(), {kTokens, experts});
        outputs.d_x = tensor_view(d_x.data(), {kTokens, kHidden});
        outputs.d_router_weight = tensor_view(d_router_weight.data(), {experts, kHidden});

        std::vector<float> expected_x;
        for (std::size_t t = 0; t < kTokens; ++t) {
          for (std::size_t h = 0; h < kHidden; ++h) expected_x.push_back(0);
        }
        std::vector<float> expected_weight(d_router_weight.size(), 0.0F);
        router.backward(routed.context, backward_inputs, outputs);
        for (std::size_t t = 0; t < kTokens; ++t) {
          for (std::size_t j = 0; j < static_cast<std::size_t>(experts); ++j) {
            const float d_logit = d_logits[t * static_cast<std::size_t>(experts) + j];
            for (std::size_t h = 0; h < kHidden; ++h) {
              float& at_x = expected_x[t * kHidden + h];
              float& at_weight = expected_weight[j * kHidden + h];
              at_x = std::fma(d_logit, weight[j * kHidden + h], at_x);
              at_weight = std::fma(d_logit, to_float(x[t * kHidden + h]), at_weight);
            }
          }
        }
        ASSERT_EQ(d_x, expected_x);
        ASSERT_EQ(d_router_weight, expected_weight);

        // Accumulated twice, without d_logits of the caller: 1 + g1 + g2.
        d_x.assign(d_x.size(), 1.0F);
        d_router_weight.assign(d_router_weight.size(), 1.0F);
        outputs.d_logits = {};
        outputs.d_x_write = GradWrite::accumulate;
        outputs.d_router_weight_write = GradWrite::accumulate;
        router.backward(routed.context, backward_inputs, outputs);
        router.backward(routed.context, backward_inputs, outputs);
        for (std::size_t i = 0; i < d_x.size(); ++i) {
          ASSERT_EQ(d_x[i], (1.0F + expected_x[i]) + expected_x[i]);
        }
        for (std::size_t i = 0; i < d_router_weight.size(); ++i) {
          ASSERT_EQ(d_router_weight[i], (1.0F + expected_weight[i]) + expected_weight[i]);
        }
      }
    }
  }
}

TEST(RouterBackward, SeveralForwardsInFlight) {
  std::mt19937 generator(15);
  RouterConfig config = testing::all_router_configs()[1];
  Router router(config);
  std::vector<Problem> problems;
  std::vector<std::vector<float>> expected;
  for (int call = 0; call < 3; ++call) {
    problems.push_back(make_problem(config, Ids::selected, generator));
    expected.push_back(run_fp32(problems.back(), router).d_logits);
  }
  // Three forwards, then their backwards in the opposite order.
  std::vector<Routed> routed;
  for (const Problem& problem : problems) {
    std::vector<float> logits;
    for (const auto& row : problem.logits_TE) logits.insert(logits.end(), row.begin(), row.end());
    routed.push_back(testing::route_logits(router, logits));
  }
  for (std::size_t call = 3; call-- > 0;) {
    std::vector<float> d_weights;
    for (const auto& row : problems[call].d_weights_TK) {
      d_weights.insert(d_weights.end(), row.begin(), row.end());
    }
    std::vector<float> d_logits(expected[call].size());
    RouterBackwardInputs inputs;
    inputs.d_weights = tensor_view(static_cast<const float*>(d_weights.data()), {kTokens, 4});
    RouterBackwardOutputs outputs;
    outputs.d_logits = tensor_view(d_logits.data(), {kTokens, 12});
    router.backward(routed[call].context, inputs, outputs);
    EXPECT_EQ(d_logits, expected[call]) << "forward " << call;
  }
}

}  // namespace
}  // namespace megamoe
