// What must not change a single bit: memory mode, saved capacity, overlap, threads, and over how
// many ranks the same tokens are spread.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "layer_fixture.h"

namespace megamoe::verify {
namespace {

class Bitwise : public testing::TestWithParam<ActivationKind> {
 protected:
  static ProblemSpec spec() {
    ProblemSpec spec = spec_with_tokens({61});
    spec.hidden_dim = channels(72);
    spec.intermediate_dim = channels(136);  // more than one segment of dw, the last one not full
    spec.top_k = 3;
    spec.routing = RoutingPattern::holes;
    spec.activation = {GetParam(), 1.0F};
    return spec;
  }
};

TEST_P(Bitwise, SavedRecomputeAndPartlySaved) {
  for (const int num_ranks : {1, 2}) {
    ProblemSpec split = spec();
    if (num_ranks == 2) split.tokens_per_rank = {40, 21};
    const Problem problem = make_problem(split);
    const LayerTensors saved = run_layer(problem, {});
    expect_right(problem, saved, {});
    RunOptions options;
    options.memory_mode = MemoryMode::recompute;
    EXPECT_EQ(differing_tensors(run_layer(problem, options), saved), "");
    options.memory_mode = MemoryMode::saved;
    for (const std::int64_t capacity : {1, 17, 64, 100000}) {
      options.saved_row_capacity = capacity;
      EXPECT_EQ(differing_tensors(run_layer(problem, options), saved), "") << capacity;
    }
  }
}

TEST_P(Bitwise, RanksThreadsAndOverlap) {
  for (const WeightGradientMode mode :
       {WeightGradientMode::store_bf16, WeightGradientMode::store_fp32,
        WeightGradientMode::accumulate_fp32}) {
    RunOptions options;
    options.weight_gradient_mode = mode;
    options.initial_gradient = 0.25F;
    const LayerTensors one = run_layer(make_problem(spec()), options);
    for (const std::vector<std::int64_t>& tokens : {std::vector<std::int64_t>{33, 28},
                                                    {0, 61},
                                                    {16, 15, 14, 16},
                                                    {1, 20, 0, 40},
                                                    {8, 8, 8, 8, 8, 8, 8, 5}}) {
      SCOPED_TRACE(testing::PrintToString(tokens));
      ProblemSpec split = spec();
      split.tokens_per_rank = tokens;
      const Problem problem = make_problem(split);
      EXPECT_EQ(differing_tensors(run_layer(problem, options), one), "");
    }
    RunOptions other = options;
    other.num_threads = 3;
    other.overlap = Overlap::off;
    EXPECT_EQ(differing_tensors(run_layer(make_problem(spec()), other), one), "");
  }
}

INSTANTIATE_TEST_SUITE_P(Activations, Bitwise,
                         testing::Values(ActivationKind::swiglu, ActivationKind::clamped_swiglu,
                                         ActivationKind::gelu_erf, ActivationKind::gelu_tanh,
                                         ActivationKind::relu2, ActivationKind::identity),
                         [](const auto& test) { return to_string(test.param); });

TEST(BitwisePatterns, EveryRoutingOnOneTwoFourAndEightRanks) {
  for (const RoutingPattern routing :
       {RoutingPattern::uniform, RoutingPattern::skewed, RoutingPattern::one_expert,
        RoutingPattern::duplicates, RoutingPattern::ties}) {
    ProblemSpec spec = spec_with_tokens({64});
    spec.routing = routing;
    const LayerTensors one = run_layer(make_problem(spec), {});
    for (const int num_ranks : {2, 4, 8}) {
      spec.tokens_per_rank.assign(num_ranks, 64 / num_ranks);
      EXPECT_EQ(differing_tensors(run_layer(make_problem(spec), {}), one), "")
          << to_string(routing) << " R=" << num_ranks;
    }
  }
}

TEST(BitwiseRows, ARowDoesNotDependOnItsTile) {
  // The same token, alone and among many.
  const Problem many = make_problem(spec_with_tokens({200}));
  const Problem alone = make_problem(spec_with_tokens({1}));
  const LayerTensors many_tensors = run_layer(many, {});
  const LayerTensors alone_tensors = run_layer(alone, {});
  for (RawTensor LayerTensors::*tensor :
       {&LayerTensors::y, &LayerTensors::dx, &LayerTensors::dweights}) {
    const std::vector<std::byte>& wanted = (alone_tensors.*tensor).bytes;
    EXPECT_TRUE(std::equal(wanted.begin(), wanted.end(), (many_tensors.*tensor).bytes.begin()));
  }
}

TEST(BitwiseNan, OneBadTokenSpoilsOnlyItselfAndItsExperts) {
  Problem problem = make_problem(spec_with_tokens({40, 24}));
  const LayerTensors clean = run_layer(problem, {});
  problem.x_TH[50 * 64 + 7] = bf16{0x7fc0};
  const LayerTensors spoilt = run_layer(problem, {});
  const HostTensor y = spoilt.y.to_host();
  const HostTensor wanted = clean.y.to_host();
  for (std::int64_t i = 0; i < 64 * 64; ++i) {
    if (i / 64 == 50) {
      EXPECT_TRUE(std::isnan(y.values[i]));
    } else {
      EXPECT_EQ(y.values[i], wanted.values[i]);
    }
  }
  const HostTensor dup = spoilt.dup.to_host();
  const HostTensor dup_wanted = clean.dup.to_host();
  for (std::int64_t expert = 0; expert < 8; ++expert) {
    const auto* ids = &problem.expert_ids_TK[100];
    const bool is_hit = ids[0] == expert || ids[1] == expert;
    bool differs = false;
    for (std::int64_t i = expert * 4096; i < (expert + 1) * 4096; ++i) {
      differs = differs || dup.values[i] != dup_wanted.values[i];
    }
    EXPECT_EQ(differs, is_hit) << "expert " << expert;
  }
}

}  // namespace
}  // namespace megamoe::verify
