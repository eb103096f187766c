// With rows travelling under products the layer has the bits of one kernel after the other, every
// time.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "layer/workspace.h"
#include "layer_fixture.h"
#include "schedule/beside_dx.h"

namespace megamoe::verify {
namespace {

/// A layer of any size that is quick to make, for two ranks.
ProblemSpec random_spec(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto pick = [&](std::initializer_list<std::int64_t> values) {
    return *(values.begin() + random() % values.size());
  };
  ProblemSpec spec;
  spec.seed = seed;
  spec.tokens_per_rank = {pick({0, 1, 5, 64, 129, 300}), pick({0, 2, 63, 200, 411})};
  spec.hidden_dim = pick({64, 128, 320, 576});
  spec.intermediate_dim = pick({64, 192, 256, 320});
  spec.num_experts = static_cast<std::int32_t>(pick({2, 4, 8, 18, 60}));
  if (spec.num_experts > 8) spec.hidden_dim = std::min<std::int64_t>(spec.hidden_dim, 128);
  spec.top_k =
      static_cast<std::int32_t>(std::min<std::int64_t>(spec.num_experts, pick({1, 2, 4, 8})));
  spec.routing = static_cast<RoutingPattern>(seed % 6);
  return spec;
}

/// Forward and backward of `problem` in a workspace of its own.
LayerTensors run_step(const Problem& problem, const RunOptions& options, Communicator& group,
                      int num_sms = 0) {
  LayerConfig config = layer_config(problem.spec, options);
  config.num_sms = num_sms;
  Workspace workspace(config, group);
  MoeLayer layer(config, group, workspace);
  poison(workspace);
  group.barrier("poisoned", 60);
  RankData data(problem, options, group.rank());
  const CallContext context = data.forward(layer);
  data.backward(layer, context);
  group.barrier("a step", 60);
  return data.tensors();
}

TEST(CudaOverlap, RandomLayersHaveTheBitsOfOneKernelAfterTheOther) {
  run_ranks(2, [](Communicator& threads) {
    const BackendGroup group(threads, {});
    for (std::uint64_t seed = 0; seed < 240; ++seed) {
      const Problem problem = make_problem(random_spec(seed));
      RunOptions options;
      options.memory_mode = seed % 2 == 0 ? MemoryMode::saved : MemoryMode::recompute;
      options.saved_row_capacity = seed % 5 == 0 ? 100 : 0;
      options.weight_gradient_mode =
          seed % 3 == 0 ? WeightGradientMode::accumulate_fp32 : WeightGradientMode::store_bf16;
      options.initial_gradient = 0.25F;
      options.overlap = Overlap::off;
      const LayerTensors wanted = run_step(problem, options, group.get());
      options.overlap = Overlap::on;
      EXPECT_EQ(differing_tensors(run_step(problem, options, group.get()), wanted), "")
          << "seed " << seed << ", rank " << threads.rank();
    }
  });
}

/// Small, and without a peer to wait for: what a sanitizer has time for.
TEST(CudaOverlap, EveryWayToRunOneRankHasTheBitsOfOneKernelAfterTheOther) {
  ProblemSpec spec = spec_with_tokens({150});
  spec.hidden_dim = 128;
  spec.routing = RoutingPattern::holes;
  const Problem problem = make_problem(spec);
  run_ranks(1, [&](Communicator& threads) {
    const BackendGroup group(threads, {});
    for (const WeightGradientMode gradients :
         {WeightGradientMode::store_bf16, WeightGradientMode::accumulate_fp32}) {
      RunOptions options;
      options.weight_gradient_mode = gradients;
      options.initial_gradient = 0.25F;
      options.overlap = Overlap::off;
      const LayerTensors wanted = run_step(problem, options, group.get());
      options.overlap = Overlap::on;
      for (const std::int64_t saved_rows : {0, 100, -1}) {
        options.memory_mode = saved_rows < 0 ? MemoryMode::recompute : MemoryMode::saved;
        options.saved_row_capacity = std::max<std::int64_t>(saved_rows, 0);
        EXPECT_EQ(differing_tensors(run_step(problem, options, group.get()), wanted), "")
            << "gradients " << static_cast<int>(gradients) << ", saved rows " << saved_rows;
      }
    }
  });
}

/// Rows enough for split_sms() on both ranks, and on the first alone.
TEST(CudaOverlap, AGradientAddedBesideDxHasTheBitsOfOneAfterTheOther) {
  run_ranks(2, [](Communicator& threads) {
    const BackendGroup group(threads, {});
    for (const std::int64_t tokens_of_second : {700, 300, 0}) {
      ProblemSpec spec = spec_with_tokens({1100, tokens_of_second});
      spec.hidden_dim = 320;
      spec.intermediate_dim = 192;
      spec.num_experts = 4;
      const std::int64_t rows = schedule::kLeastRowsBesideDx;
      ASSERT_GE(1100 * 2 * spec.top_k / spec.num_experts, rows);
      ASSERT_EQ(tokens_of_second * 2 * spec.top_k / spec.num_experts >= rows,
                tokens_of_second == 700);
      const Problem problem = make_problem(spec);
      RunOptions options;
      options.weight_gradient_mode = WeightGradientMode::accumulate_fp32;
      options.initial_gradient = 0.25F;
      options.overlap = Overlap::off;
      const LayerTensors wanted = run_step(problem, options, group.get());
      options.overlap = Overlap::on;
      for (int step = 0; step < 60; ++step) {
        options.memory_mode = step % 3 == 2 ? MemoryMode::recompute : MemoryMode::saved;
        options.saved_row_capacity = step % 3 == 1 ? 100 : 0;
        ASSERT_EQ(differing_tensors(run_step(problem, options, group.get()), wanted), "")
            << tokens_of_second << " tokens, step " << step << ", rank " << threads.rank();
      }
    }
  });
}

/// Few clusters take many tiles each, with experts without rows between them, and share them with
/// those that begin behind dx.
TEST(CudaOverlap, AFewSmsGiveTheBitsOfAll) {
  run_ranks(2, [](Communicator& threads) {
    const BackendGroup group(threads, {});
    for (const RoutingPattern routing : {RoutingPattern::uniform, RoutingPattern::one_expert}) {
      ProblemSpec spec = spec_with_tokens({1100, 900});
      spec.hidden_dim = 576;
      spec.intermediate_dim = 320;
      spec.num_experts = 8;
      spec.top_k = 2;
      spec.routing = routing;
      const Problem problem = make_problem(spec);
      for (const WeightGradientMode gradients :
           {WeightGradientMode::store_bf16, WeightGradientMode::accumulate_fp32}) {
        RunOptions options;
        options.weight_gradient_mode = gradients;
        options.initial_gradient = 0.25F;
        const LayerTensors wanted = run_step(problem, options, group.get());
        for (const int num_sms : {2, 4, 6, 20}) {
          EXPECT_EQ(differing_tensors(run_step(problem, options, group.get(), num_sms), wanted), "")
              << "routing " << to_string(routing) << ", gradients " << static_cast<int>(gradients)
              << ", SMs " << num_sms << ", rank " << threads.rank();
        }
      }
    }
  });
}

TEST(CudaOverlap, TwoThousandStepsGiveEqualBits) {
  ProblemSpec spec = spec_with_tokens({257, 190});
  spec.hidden_dim = 512;
  spec.intermediate_dim = 256;
  spec.num_experts = 16;
  spec.top_k = 4;
  const Problem problem = make_problem(spec);
  run_sessions(problem, {}, [&](RankSession& session, Communicator& group) {
    LayerTensors first;
    for (int step = 0; step < 2000; ++step) {
      const CallContext context = session.forward();
      session.backward(context);
      if (step == 0) first = session.tensors();
      ASSERT_EQ(differing_tensors(session.tensors(), first), "")
          << "step " << step << ", rank " << group.rank();
    }
  });
}

}  // namespace
}  // namespace megamoe::verify
