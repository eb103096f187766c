// The CPU backend against the oracle: every routing pattern, R, T, activation and mode; and that a
// wrong weight is found.
#include "verify/verify.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "layer_fixture.h"
#include "sanitized.h"
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

void expect_verified(const Problem& problem, const RunOptions& options) {
  const auto comparisons = verify_backend(problem, options);
  EXPECT_TRUE(all_passed(comparisons)) << failures(comparisons);
}

constexpr RoutingPattern kPatterns[] = {RoutingPattern::uniform,    RoutingPattern::skewed,
                                        RoutingPattern::one_expert, RoutingPattern::duplicates,
                                        RoutingPattern::holes,      RoutingPattern::ties};

constexpr ActivationKind kActivations[] = {ActivationKind::swiglu,   ActivationKind::clamped_swiglu,
                                           ActivationKind::gelu_erf, ActivationKind::gelu_tanh,
                                           ActivationKind::relu2,    ActivationKind::identity};

constexpr WeightGradientMode kGradientModes[] = {WeightGradientMode::store_bf16,
                                                 WeightGradientMode::store_fp32,
                                                 WeightGradientMode::accumulate_fp32};

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
  expect_verified(make_problem(spec_of(routing, num_ranks, num_tokens)), {});
}

INSTANTIATE_TEST_SUITE_P(All, VerifyPattern, testing::ValuesIn(pattern_cases()), case_name);

std::string failed_names(const std::vector<Comparison>& comparisons) {
  std::string names;
  for (const Comparison& comparison : comparisons) {
    if (!comparison.passed) names += comparison.name + " ";
  }
  return names;
}

TEST(Verify, FindsOnePerturbedWeight) {
  for (const RoutingPattern routing : kPatterns) {
    for (const int num_ranks : {1, 2}) {
      for (const std::int64_t num_tokens : {1, less_if_sanitized(64, 9)}) {
        SCOPED_TRACE(testing::Message()
                     << to_string(routing) << " R=" << num_ranks << " T=" << num_tokens);
        const Problem problem = make_problem(spec_of(routing, num_ranks, num_tokens));
        const auto failed_with = [&](ExpertWeight weight) {
          return failed_names(verify_backend(problem, {}, weight));
        };
        // y can hide a weight of gate or up: where act(g) happens to be small. dx cannot.
        EXPECT_NE(failed_with(ExpertWeight::gate).find("dx"), std::string::npos);
        EXPECT_NE(failed_with(ExpertWeight::up).find("dx"), std::string::npos);
        const std::string down = failed_with(ExpertWeight::down);
        EXPECT_EQ(down.rfind("y dx ", 0), 0U) << down;
        EXPECT_EQ(down.find("ddown"), std::string::npos) << down;  // it does not depend on it
      }
    }
  }
}

TEST(Verify, EveryActivationModeAndGradientStorage) {
  for (const ActivationKind kind : kActivations) {
    for (const MemoryMode memory_mode : {MemoryMode::saved, MemoryMode::recompute}) {
      for (const WeightGradientMode gradient_mode : kGradientModes) {
        SCOPED_TRACE(testing::Message() << to_string(kind) << static_cast<int>(memory_mode)
                                        << static_cast<int>(gradient_mode));
        ProblemSpec spec = spec_of(RoutingPattern::uniform, 2, less_if_sanitized(50, 13));
        spec.activation = {kind, 1.0F};
        RunOptions options;
        options.memory_mode = memory_mode;
        options.weight_gradient_mode = gradient_mode;
        options.initial_gradient = 0.5F;
        expect_verified(make_problem(spec), options);
      }
    }
  }
}

TEST(Verify, FindsSwappedGateAndUp) {
  Problem problem = make_problem(spec_of(RoutingPattern::uniform, 2, 20));
  const Problem right = problem;
  std::swap(problem.gate_EIH, problem.up_EIH);
  const std::string names = failed_names(judge_layer(right, run_layer(problem, {}), {}));
  EXPECT_EQ(names, "y dx dgate dup ddown dweights ");
}

TEST(Verify, FindsGradientsOfTwiceTheSum) {
  const Problem problem = make_problem(spec_of(RoutingPattern::uniform, 2, 20));
  RunOptions options;
  options.weight_gradient_mode = WeightGradientMode::accumulate_fp32;
  const LayerTensors tensors =
      run_sessions(problem, options, [](RankSession& session, Communicator&) {
        for (int step = 0; step < 2; ++step) {
          const CallContext context = session.forward();
          session.backward(context);
        }
      });
  const std::string names = failed_names(judge_layer(problem, tensors, options));
  EXPECT_EQ(names, "dgate dup ddown ");
}

TEST(Verify, TinyTokenCountsAtManySeeds) {
  for (std::uint64_t seed = 0; seed < less_if_sanitized<std::uint64_t>(400, 40); ++seed) {
    ProblemSpec spec = spec_of(RoutingPattern::uniform, 1, 1 + seed % 2);
    spec.seed = seed;
    spec.hidden_dim = channels(8 + 8 * (seed % 3));
    spec.intermediate_dim = channels(8 + 8 * (seed % 5));
    SCOPED_TRACE(seed);
    expect_verified(make_problem(spec), {});
  }
}

/// A layer of a few channels, tokens and experts, of any activation, routing and mode.
ProblemSpec tiny_spec(std::mt19937& random) {
  const auto pick = [&](int lowest, int highest) {
    return lowest + static_cast<int>(random() % static_cast<unsigned>(highest - lowest + 1));
  };
  ProblemSpec spec;
  spec.tokens_per_rank.resize(pick(1, 2));
  for (std::int64_t& num_tokens : spec.tokens_per_rank) num_tokens = pick(0, 9);
  if (spec.num_tokens() == 0) spec.tokens_per_rank[0] = 1;
  spec.hidden_dim = channels(pick(1, 8));
  spec.intermediate_dim = channels(pick(1, 8));
  spec.num_experts = spec.num_ranks() * pick(1, 4);
  spec.top_k = pick(1, std::min(4, static_cast<int>(spec.num_experts)));
  spec.routing = kPatterns[pick(0, 5)];
  spec.activation = {kActivations[pick(0, 5)], 1.0F};
  spec.seed = random();
  return spec;
}

/// A few roundings do not average out, exact zeros lie beside clamps, and little is left of GELU
/// far below 0: numerics.md.
TEST(Verify, RandomTinyLayersAreRight) {
  // Other backends' layers have 64 channels or more, and are less tiny.
  const int num_layers = default_backend() == Backend::cpu ? less_if_sanitized(500, 60) : 60;
  std::mt19937 random(5);
  for (int number = 0; number < num_layers; ++number) {
    const ProblemSpec spec = tiny_spec(random);
    RunOptions options;
    options.memory_mode = number % 2 == 0 ? MemoryMode::saved : MemoryMode::recompute;
    options.weight_gradient_mode = kGradientModes[number % 3];
    options.initial_gradient = 0.5F;
    SCOPED_TRACE(number);
    expect_verified(make_problem(spec), options);
  }
}

constexpr RawTensor LayerTensors::*kRoundedTensors[] = {&LayerTensors::y, &LayerTensors::dx,
                                                        &LayerTensors::dgate, &LayerTensors::dup,
                                                        &LayerTensors::ddown};

/// Moves the elements from `first` to `last` of a bf16 tensor by so many steps away from 0.
void move_by_steps(RawTensor& tensor, std::int64_t first, std::int64_t last, int num_steps) {
  for (std::int64_t i = first; i < last; ++i) {
    std::uint16_t bits = 0;
    std::memcpy(&bits, &tensor.bytes[2 * i], sizeof bits);
    if ((bits & 0x7fff) != 0) bits = static_cast<std::uint16_t>(bits + num_steps);
    std::memcpy(&tensor.bytes[2 * i], &bits, sizeof bits);
  }
}

TEST(Verify, FindsASliceThatIsTwoStepsOff) {
  const Problem problem = make_problem(spec_of(RoutingPattern::uniform, 1, 64));
  const LayerTensors right = run_layer(problem, {});
  for (const auto tensor : kRoundedTensors) {
    const std::int64_t size = (right.*tensor).num_elements() / (right.*tensor).shape[0];
    LayerTensors wrong = right;
    move_by_steps(wrong.*tensor, 3 * size, 4 * size, 2);
    const std::string found = failures(judge_layer(problem, wrong, {}));
    EXPECT_NE(found.find(tensor == &LayerTensors::y || tensor == &LayerTensors::dx ? "token 3"
                                                                                   : "expert 3"),
              std::string::npos)
        << found;
  }
}

/// One slot's rows are missing in the weight gradients: with clamps, too, whose jumps are no error.
TEST(Verify, FindsASlotThatIsLost) {
  for (const ActivationKind kind : kActivations) {
    ProblemSpec spec = spec_of(RoutingPattern::uniform, 1, 64);
    spec.activation = {kind, 1.0F};
    const Problem problem = make_problem(spec);
    const LayerTensors right = run_layer(problem, {});
    for (std::size_t slot = 0; slot < problem.expert_ids_TK.size(); slot += 16) {
      SCOPED_TRACE(slot);
      Problem without = problem;
      without.expert_ids_TK[slot] = -1;
      const LayerTensors lost = run_layer(without, {});
      LayerTensors wrong = right;
      wrong.dgate = lost.dgate;
      wrong.dup = lost.dup;
      wrong.ddown = lost.ddown;
      const std::string found = failures(judge_layer(problem, wrong, {}));
      if (is_gated(kind)) {
        EXPECT_NE(found.find("dgate: "), std::string::npos) << found;
      }
      EXPECT_NE(found.find("dup: "), std::string::npos) << found;
      EXPECT_NE(found.find("ddown: "), std::string::npos) << found;
    }
  }
}

/// At sizes where roundings average out nothing allows much more than the baseline does.
TEST(Verify, AllowsTwiceTheBaselinesErrorAtUsualSizes) {
  const Problem problem = make_problem(spec_of(RoutingPattern::uniform, 1, 512));
  for (const Comparison& comparison : judge_layer(problem, run_layer(problem, {}), {})) {
    EXPECT_LT(comparison.allowed, 1.1 * 2.0 * comparison.error) << comparison.name;
  }
}

}  // namespace
}  // namespace megamoe::verify
