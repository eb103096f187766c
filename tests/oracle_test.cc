// The fp64 oracle against finite differences of its own forward pass, and its rounded variant.
#include "verify/oracle.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

#include "verify/problem.h"

namespace megamoe::verify {
namespace {

double norm(const std::vector<double>& values) {
  return std::sqrt(std::inner_product(values.begin(), values.end(), values.begin(), 0.0));
}

double relative_difference(const std::vector<double>& left, const std::vector<double>& right) {
  std::vector<double> difference(left.size());
  std::transform(left.begin(), left.end(), right.begin(), difference.begin(), std::minus<>());
  return norm(difference) / norm(right);
}

/// <y, dy>: the loss whose gradients the backward pass computes.
double loss(const OracleInput& input) {
  const OracleResult result = evaluate(input, Rounding::none, GradientStorage::fp32);
  return std::inner_product(result.y_TH.begin(), result.y_TH.end(), input.dy_TH.begin(), 0.0);
}

/// Checks every 7th element of `gradient` against central differences of `loss_of(parameter)`.
template <class Loss>
void expect_gradient(const char* name, std::vector<double>& parameter,
                     const std::vector<double>& gradient, const Loss& loss_of) {
  constexpr double kStep = 1e-5;
  constexpr double kTolerance = 1e-8;  // kStep^2 for the truncation, 1e-16 / kStep for rounding
  ASSERT_EQ(parameter.size(), gradient.size()) << name;
  for (std::size_t i = 0; i < parameter.size(); i += 7) {
    const double value = parameter[i];
    parameter[i] = value + kStep;
    const double above = loss_of();
    parameter[i] = value - kStep;
    const double below = loss_of();
    parameter[i] = value;
    const double difference = (above - below) / (2 * kStep);
    EXPECT_NEAR(gradient[i], difference, kTolerance * (1.0 + std::abs(difference))) << name << i;
  }
}

ProblemSpec small_spec(ActivationKind kind) {
  ProblemSpec spec;
  spec.tokens_per_rank = {5};
  spec.hidden_dim = 6;
  spec.intermediate_dim = 10;
  spec.num_experts = 4;
  spec.top_k = 3;
  spec.seed = 11;
  spec.activation = {kind, 0.6F};  // a limit that a third of g and u exceed
  return spec;
}

class OracleActivation : public testing::TestWithParam<ActivationKind> {};

TEST_P(OracleActivation, GradientsAreFiniteDifferences) {
  for (const RoutingPattern routing : {RoutingPattern::duplicates, RoutingPattern::holes}) {
    ProblemSpec spec = small_spec(GetParam());
    spec.routing = routing;
    OracleInput input = oracle_input(make_problem(spec));
    // NaN weights of empty slots must not matter, but a finite difference of them needs numbers.
    for (double& weight : input.weights_TK) {
      if (std::isnan(weight)) weight = 0.5;
    }
    const OracleResult result = evaluate(input, Rounding::none, GradientStorage::fp32);
    const auto loss_of = [&] { return loss(input); };
    expect_gradient("x", input.x_TH, result.dx_TH, loss_of);
    expect_gradient("weights", input.weights_TK, result.dweights_TK, loss_of);
    expect_gradient("gate", input.gate_EIH, result.dgate_EIH, loss_of);
    expect_gradient("up", input.up_EIH, result.dup_EIH, loss_of);
    expect_gradient("down", input.down_EHI, result.ddown_EHI, loss_of);
  }
}

TEST_P(OracleActivation, GradientsFlowThroughTheRouterToo) {
  OracleInput input = oracle_input(make_problem(small_spec(GetParam())));
  for (const auto scores : {RouterOracle::Scores::softmax, RouterOracle::Scores::sigmoid}) {
    for (const auto renormalise : {RouterOracle::Renormalise::off, RouterOracle::Renormalise::on}) {
      RouterOracle router = router_oracle(make_problem(small_spec(GetParam())));
      router.scores = scores;
      router.renormalise = renormalise;
      router.scale = 1.5;
      const auto loss_of = [&] {
        input.x_TH = router.x_TH;
        input.weights_TK = routing_weights(router, input.expert_ids_TK);
        return loss(input);
      };
      loss_of();
      const OracleResult result = evaluate(input, Rounding::none, GradientStorage::fp32);
      RouterGradients gradients = router_gradients(router, input.expert_ids_TK, result.dweights_TK);
      for (std::size_t i = 0; i < gradients.dx_TH.size(); ++i) {
        gradients.dx_TH[i] += result.dx_TH[i];
      }
      expect_gradient("router", router.weight_EH, gradients.dweight_EH, loss_of);
      expect_gradient("x", router.x_TH, gradients.dx_TH, loss_of);
    }
  }
}

TEST_P(OracleActivation, RoundedVariantIsOffByAboutABf16Rounding) {
  ProblemSpec spec = small_spec(GetParam());
  spec.tokens_per_rank = {40};
  spec.hidden_dim = spec.intermediate_dim = 64;
  const OracleInput input = oracle_input(make_problem(spec));
  const OracleResult exact = evaluate(input, Rounding::none, GradientStorage::bf16);
  const OracleResult rounded = evaluate(input, Rounding::contract, GradientStorage::bf16);
  const auto expect_rounding = [](const char* name, const std::vector<double>& left,
                                  const std::vector<double>& right) {
    if (right.empty()) return;
    const double error = relative_difference(left, right);
    EXPECT_GT(error, 0x1p-10) << name;  // one rounding: 2^-8 / sqrt(3), less for high significands
    EXPECT_LT(error, 0x1p-6) << name;   // a chain of at most six of them, clamps that flip included
  };
  expect_rounding("y", rounded.y_TH, exact.y_TH);
  expect_rounding("dx", rounded.dx_TH, exact.dx_TH);
  expect_rounding("dgate", rounded.dgate_EIH, exact.dgate_EIH);
  expect_rounding("dup", rounded.dup_EIH, exact.dup_EIH);
  expect_rounding("ddown", rounded.ddown_EHI, exact.ddown_EHI);
  EXPECT_LT(relative_difference(rounded.dweights_TK, exact.dweights_TK), 0x1p-5);
}

/// The root of the sum of the variances: half a step off at most, anywhere between.
double expected_error(const std::vector<RoundingEffect>& effects) {
  double squared = 0.0;
  for (const RoundingEffect& effect : effects) squared += effect.squared;
  return std::sqrt(squared / 3.0);
}

TEST_P(OracleActivation, EffectsOfRoundingsTellTheErrorOfTheRoundedVariant) {
  for (const auto storage : {GradientStorage::bf16, GradientStorage::fp32}) {
    ProblemSpec spec = small_spec(GetParam());
    spec.tokens_per_rank = {100};
    spec.hidden_dim = spec.intermediate_dim = 64;
    spec.activation.limit = 100.0F;  // that none exceeds: a clamp's jump is no small change
    const OracleInput input = oracle_input(make_problem(spec));
    const OracleResult exact = evaluate(input, Rounding::none, storage);
    const OracleResult rounded = evaluate(input, Rounding::contract, storage);
    const auto expect_error = [&](const char* name, const std::vector<double>& right,
                                  const std::vector<double>& wrong,
                                  const std::vector<RoundingEffect>& effects) {
      if (right.empty()) return;
      const double error = relative_difference(wrong, right) * norm(right);
      // The identity of a rounded u is not rounded again, which the effects do not know.
      EXPECT_GT(error, 0.65 * expected_error(effects)) << name;
      EXPECT_LT(error, 1.2 * expected_error(effects)) << name;
    };
    expect_error("y", exact.y_TH, rounded.y_TH, exact.effects.y_T);
    expect_error("dx", exact.dx_TH, rounded.dx_TH, exact.effects.dx_T);
    expect_error("dweights", exact.dweights_TK, rounded.dweights_TK, exact.effects.dweights_TK);
    expect_error("dgate", exact.dgate_EIH, rounded.dgate_EIH, exact.effects.dgate_E);
    expect_error("dup", exact.dup_EIH, rounded.dup_EIH, exact.effects.dup_E);
    expect_error("ddown", exact.ddown_EHI, rounded.ddown_EHI, exact.effects.ddown_E);
  }
}

INSTANTIATE_TEST_SUITE_P(All, OracleActivation,
                         testing::Values(ActivationKind::swiglu, ActivationKind::clamped_swiglu,
                                         ActivationKind::gelu_erf, ActivationKind::gelu_tanh,
                                         ActivationKind::relu2, ActivationKind::identity));

TEST(Oracle, OneTokenOneExpertByHand) {
  OracleInput input;
  input.num_tokens = input.hidden_dim = input.intermediate_dim = input.num_experts = 1;
  input.top_k = 2;
  input.activation = {ActivationKind::relu2};
  input.x_TH = {3.0};
  input.dy_TH = {5.0};
  input.expert_ids_TK = {-1, 0};
  input.weights_TK = {std::nan(""), 0.5};
  input.up_EIH = {2.0};
  input.down_EHI = {0.25};
  const OracleResult result = evaluate(input, Rounding::contract, GradientStorage::bf16);
  EXPECT_EQ(result.y_TH[0], 4.5);                                   // u = 6, a = 36, o = 9
  EXPECT_EQ(result.dweights_TK, (std::vector<double>{0.0, 45.0}));  // p = 1.25, times a
  EXPECT_EQ(result.dweights_scale_TK, (std::vector<double>{0.0, 45.0}));
  EXPECT_EQ(result.ddown_EHI[0], 90.0);  // dy w a
  EXPECT_EQ(result.dup_EIH[0], 22.5);    // du = w p 2u = 7.5
  EXPECT_EQ(result.dx_TH[0], 15.0);
}

/// One token, slot, channel and expert, of weights 1.
OracleInput one_channel(Activation activation, double x) {
  OracleInput input;
  input.num_tokens = input.hidden_dim = input.intermediate_dim = input.num_experts = 1;
  input.top_k = 1;
  input.activation = activation;
  input.x_TH = {x};
  input.dy_TH = {1.0};
  input.expert_ids_TK = {0};
  input.weights_TK = {1.0};
  if (is_gated(activation.kind)) input.gate_EIH = {1.0};
  input.up_EIH = input.down_EHI = {1.0};
  return input;
}

TEST(Oracle, EffectsOfRoundingsByHand) {
  const RoundingEffects effects =
      evaluate(one_channel({ActivationKind::identity}, 1.5), Rounding::none, GradientStorage::fp32)
          .effects;
  // u, a, o and y, which are 1.5, are each off by up to 2^-8; fp32's 2^-22 is little beside it.
  EXPECT_NEAR(effects.y_T[0].squared, 4 * 0x1p-16, 0x1p-26);
  EXPECT_NEAR(effects.y_T[0].largest, 0x1p-8, 0x1p-20);
  EXPECT_NEAR(effects.dweights_TK[0].squared, 2 * 0x1p-16, 0x1p-26);  // u and a
  EXPECT_NEAR(effects.dx_T[0].squared, 3 * 0x1p-16, 0x1p-26);         // du = 1, the slot's row, dx
  EXPECT_NEAR(effects.dup_E[0].squared, 0x1p-16 * 1.5 * 1.5, 0x1p-26);
  EXPECT_NEAR(effects.ddown_E[0].squared, 3 * 0x1p-16, 0x1p-26);  // u, a and w a
}

TEST(Oracle, AClampTakesTheGradientOfWhatRoundsBeyondItsLimit) {
  const auto at = [](double x) {
    return evaluate(one_channel({ActivationKind::clamped_swiglu, 1.0F}, x), Rounding::none,
                    GradientStorage::fp32);
  };
  const OracleResult at_limit = at(1.0 + 0x1p-9);  // g and u round to it
  EXPECT_GT(at_limit.dup_EIH[0], 0.7);
  EXPECT_LT(at_limit.effects.dup_E[0].largest, 0.01);
  // Halfway to the next bf16 number: fp32's sum decides, and with it the whole gradient changes.
  EXPECT_GT(at(1.0 + 0x1p-8).effects.dup_E[0].largest, 0.7);
  EXPECT_EQ(at(1.5).dup_EIH[0], 0.0);
  EXPECT_EQ(at(1.5).effects.dup_E[0].largest, 0.0);
}

TEST(Oracle, OfGelusTailLittleIsKnownInFp32) {
  for (const auto kind : {ActivationKind::gelu_erf, ActivationKind::gelu_tanh}) {
    const OracleResult exact =
        evaluate(one_channel({kind}, -8.0), Rounding::none, GradientStorage::fp32);
    EXPECT_GT(exact.effects.y_T[0].largest, std::abs(exact.y_TH[0]));
    EXPECT_LT(exact.effects.y_T[0].largest, 64 * 0x1p-22);
  }
}

TEST(Oracle, SlotsOfOneExpertAreRoundedAlike) {
  OracleInput input = one_channel({ActivationKind::identity}, 1.5);
  const auto effect = [&] {
    return evaluate(input, Rounding::none, GradientStorage::fp32).effects.ddown_E[0].squared;
  };
  const double once = effect();
  input.top_k = 2;
  input.expert_ids_TK = {0, 0};
  input.weights_TK = {1.0, 1.0};
  EXPECT_NEAR(effect(), 4 * once, 1e-12);
}

TEST(Oracle, SumsSlotsBeforeTheOneRounding) {
  OracleInput input;  // 256 + 7 x 1: a sum kept in bf16 would lose the ones
  input.num_tokens = input.hidden_dim = input.intermediate_dim = 1;
  input.num_experts = 1;
  input.top_k = 8;
  input.activation = {ActivationKind::identity};
  input.x_TH = input.dy_TH = {1.0};
  input.expert_ids_TK.assign(8, 0);
  input.weights_TK = {256, 1, 1, 1, 1, 1, 1, 1};
  input.up_EIH = input.down_EHI = {1.0};
  const OracleResult result = evaluate(input, Rounding::contract, GradientStorage::bf16);
  EXPECT_EQ(result.y_TH[0], 264.0);  // 263 to bf16: ties go to even
}

TEST(Oracle, RefusesWhatItCannotEvaluate) {
  OracleInput input = oracle_input(make_problem(small_spec(ActivationKind::swiglu)));
  input.expert_ids_TK[2] = 4;
  EXPECT_THROW(evaluate(input, Rounding::none, GradientStorage::fp32), std::logic_error);
  input.expert_ids_TK[2] = 0;
  input.down_EHI.pop_back();
  EXPECT_THROW(evaluate(input, Rounding::none, GradientStorage::fp32), std::logic_error);
}

TEST(Oracle, RoundsToBf16AsTheStorageTypeDoes) {
  for (std::uint64_t i = 0; i < 10000; ++i) {
    const auto value = static_cast<float>(normal_at(1, 2, i));
    EXPECT_EQ(round_to_bf16(value), to_float(to_bf16(value)));
  }
  EXPECT_EQ(round_to_bf16(1.0 + 0x1p-8), 1.0);  // ties to even
  EXPECT_EQ(round_to_bf16(-(1.0 + 3 * 0x1p-8)), -1.015625);
  EXPECT_EQ(round_to_bf16(255.9), 256.0);
}

}  // namespace
}  // namespace megamoe::verify
