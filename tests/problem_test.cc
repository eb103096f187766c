// Problems are reproducible, do not depend on how tokens are spread over ranks, and have the
// routing that their pattern promises.
#include "verify/problem.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>

namespace megamoe::verify {
namespace {

ProblemSpec spec_with(RoutingPattern routing, std::vector<std::int64_t> tokens_per_rank) {
  ProblemSpec spec;
  spec.tokens_per_rank = std::move(tokens_per_rank);
  spec.hidden_dim = 32;
  spec.intermediate_dim = 16;
  spec.top_k = 3;
  spec.routing = routing;
  spec.seed = 5;
  return spec;
}

std::vector<std::int64_t> counts(const Problem& problem) {
  std::vector<std::int64_t> counts_E(problem.spec.num_experts, 0);
  for (const std::int32_t id : problem.expert_ids_TK) {
    if (id >= 0) ++counts_E[id];
  }
  return counts_E;
}

TEST(Problem, DoesNotDependOnHowTokensAreSpread) {
  const Problem one = make_problem(spec_with(RoutingPattern::holes, {64}));
  const Problem three = make_problem(spec_with(RoutingPattern::holes, {40, 0, 24}));
  const auto bits = [](const std::vector<bf16>& values) {
    std::vector<std::uint16_t> result(values.size());
    std::transform(values.begin(), values.end(), result.begin(),
                   [](bf16 value) { return value.bits; });
    return result;
  };
  EXPECT_EQ(bits(one.x_TH), bits(three.x_TH));
  EXPECT_EQ(bits(one.down_EHI), bits(three.down_EHI));
  EXPECT_EQ(one.expert_ids_TK, three.expert_ids_TK);
  EXPECT_EQ(three.spec.first_token(2), 40);
  EXPECT_EQ(three.spec.max_tokens(), 40);
}

TEST(Problem, SeedsAndTensorsDiffer) {
  ProblemSpec spec = spec_with(RoutingPattern::uniform, {8});
  const Problem first = make_problem(spec);
  spec.seed = 6;
  const Problem second = make_problem(spec);
  EXPECT_NE(to_doubles(first.x_TH), to_doubles(second.x_TH));
  EXPECT_NE(to_doubles(first.x_TH), to_doubles(first.dy_TH));
  EXPECT_NE(to_doubles(first.gate_EIH), to_doubles(first.up_EIH));
}

TEST(Problem, NumbersAreStandardNormal) {
  constexpr int kCount = 100000;
  double sum = 0.0;
  double squares = 0.0;
  for (int i = 0; i < kCount; ++i) {
    const double value = normal_at(7, 1, i);
    sum += value;
    squares += value * value;
  }
  EXPECT_NEAR(sum / kCount, 0.0, 5.0 / std::sqrt(kCount));
  EXPECT_NEAR(squares / kCount, 1.0, 5.0 * std::sqrt(2.0 / kCount));
}

TEST(Problem, Patterns) {
  const auto uniform = counts(make_problem(spec_with(RoutingPattern::uniform, {256})));
  EXPECT_LT(*std::max_element(uniform.begin(), uniform.end()), 3 * 256 * 3 / 8);
  EXPECT_GT(*std::min_element(uniform.begin(), uniform.end()), 0);

  const auto skewed = counts(make_problem(spec_with(RoutingPattern::skewed, {256})));
  EXPECT_GT(skewed[0], 4 * *std::min_element(skewed.begin(), skewed.end()));

  const auto one = counts(make_problem(spec_with(RoutingPattern::one_expert, {256})));
  EXPECT_EQ(one[7], 3 * 256);

  const Problem ties = make_problem(spec_with(RoutingPattern::ties, {4}));
  EXPECT_EQ(ties.expert_ids_TK, (std::vector<std::int32_t>{0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2}));
  EXPECT_EQ(ties.weights_TK, std::vector<float>(12, 0.125F));

  const Problem duplicates = make_problem(spec_with(RoutingPattern::duplicates, {4}));
  EXPECT_EQ(duplicates.expert_ids_TK[0], duplicates.expert_ids_TK[2]);
  EXPECT_EQ(duplicates.weights_TK[0], duplicates.weights_TK[2]);
  EXPECT_NE(duplicates.expert_ids_TK[3], duplicates.expert_ids_TK[5]);
}

TEST(Problem, HolesAreFirstLastAndAllSlots) {
  const Problem holes = make_problem(spec_with(RoutingPattern::holes, {4}));
  const auto empty = [&](std::int64_t token) {
    std::vector<bool> slots;
    for (int k = 0; k < 3; ++k) {
      const std::int64_t slot = token * 3 + k;
      slots.push_back(holes.expert_ids_TK[slot] == -1);
      EXPECT_EQ(std::isnan(holes.weights_TK[slot]), slots.back());
    }
    return slots;
  };
  EXPECT_EQ(empty(0), (std::vector<bool>{true, false, false}));
  EXPECT_EQ(empty(1), (std::vector<bool>{false, false, true}));
  EXPECT_EQ(empty(2), (std::vector<bool>{true, true, true}));
  EXPECT_EQ(empty(3), (std::vector<bool>{false, false, false}));
}

TEST(Problem, RefusesImpossibleOnes) {
  ProblemSpec spec = spec_with(RoutingPattern::uniform, {4});
  spec.top_k = 9;
  EXPECT_THROW(make_problem(spec), std::invalid_argument);
  spec.routing = RoutingPattern::duplicates;
  EXPECT_EQ(make_problem(spec).expert_ids_TK.size(), 36U);
  spec.tokens_per_rank = {3, -1};
  EXPECT_THROW(make_problem(spec), std::invalid_argument);
}

}  // namespace
}  // namespace megamoe::verify
