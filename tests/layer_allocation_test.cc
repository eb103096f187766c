// In steady state a step of the layer allocates nothing, and calls without a backward leave nothing
// behind (case 26).
#include <gtest/gtest.h>

#include <array>

#include "count_allocations.h"
#include "layer_fixture.h"
#include "sanitized.h"

namespace megamoe::verify {
namespace {

/// Allocations, on all ranks together, while every rank runs `work`.
template <class Work>
std::int64_t allocations_of(Communicator& group, const Work& work) {
  group.barrier("the count before", 60);
  const std::int64_t before = megamoe::testing::num_allocations();
  group.barrier("the work", 60);
  work();
  group.barrier("the count after", 60);
  const std::int64_t after = megamoe::testing::num_allocations();
  group.barrier("the end", 60);
  return after - before;
}

struct AllocationCase {
  int num_hosts;
  int num_ranks;
  int num_threads;
  MemoryMode memory_mode;
  WeightGradientMode weight_gradient_mode;
};

class LayerAllocation : public ::testing::TestWithParam<AllocationCase> {
 protected:
  LayerAllocation()
      : problem_(
            make_problem(spec_with_tokens(std::vector<std::int64_t>(GetParam().num_ranks, 40)))) {
    options_.num_hosts = GetParam().num_hosts;
    options_.num_threads = GetParam().num_threads;
    options_.memory_mode = GetParam().memory_mode;
    options_.weight_gradient_mode = GetParam().weight_gradient_mode;
  }
  Problem problem_;
  RunOptions options_;
};

TEST_P(LayerAllocation, NoneAfterTheFirstStep) {
  run_sessions(problem_, options_, [&](RankSession& session, Communicator& group) {
    const auto step = [&] {
      const CallContext context = session.forward();
      session.backward(context);
    };
    EXPECT_GT(allocations_of(group, step), 0);  // the counter works
    EXPECT_EQ(allocations_of(group,
                             [&] {
                               for (int i = 0; i < 20; ++i) step();
                             }),
              0);
  });
}

TEST_P(LayerAllocation, NoneWithSeveralCallsInFlight) {
  run_sessions(problem_, options_, [&](RankSession& session, Communicator& group) {
    const auto steps = [&] {
      std::array<CallContext, 3> contexts;
      for (CallContext& context : contexts) context = session.forward();
      for (const CallContext& context : contexts) session.backward(context);
    };
    steps();
    EXPECT_EQ(allocations_of(group, steps), 0);
  });
}

TEST_P(LayerAllocation, NoneForOtherRoutingsAndFewerTokens) {
  ProblemSpec spec = problem_.spec;
  spec.routing = RoutingPattern::one_expert;
  const Problem skewed = make_problem(spec);
  spec.tokens_per_rank.assign(GetParam().num_ranks, 3);
  const Problem few = make_problem(spec);
  run_sessions(problem_, options_, [&](RankSession& session, Communicator& group) {
    RankData skewed_data(skewed, options_, group.rank());
    RankData few_data(few, options_, group.rank());
    {
      const CallContext context = session.forward();
      session.backward(context);
    }
    EXPECT_EQ(allocations_of(group,
                             [&] {
                               for (RankData* data : {&skewed_data, &few_data}) {
                                 const CallContext context = data->forward(session.layer());
                                 data->backward(session.layer(), context);
                               }
                             }),
              0);
  });
}

TEST_P(LayerAllocation, Case26AThousandForwardsWithoutABackward) {
  run_sessions(problem_, options_, [&](RankSession& session, Communicator& group) {
    constexpr int kForwards = less_if_sanitized(1000, 50);
    { const CallContext context = session.forward(); }
    EXPECT_EQ(allocations_of(group,
                             [&] {
                               for (int i = 0; i < kForwards; ++i) session.forward();
                             }),
              0);
  });
}

INSTANTIATE_TEST_SUITE_P(
    Ways, LayerAllocation,
    ::testing::Values(
        AllocationCase{1, 1, 1, MemoryMode::saved, WeightGradientMode::store_bf16},
        AllocationCase{1, 1, 3, MemoryMode::recompute, WeightGradientMode::store_fp32},
        AllocationCase{1, 2, 2, MemoryMode::saved, WeightGradientMode::accumulate_fp32},
        AllocationCase{2, 4, 1, MemoryMode::saved, WeightGradientMode::store_bf16},
        AllocationCase{4, 8, 1, MemoryMode::recompute, WeightGradientMode::store_bf16}),
    [](const auto& test) {
      const AllocationCase& of = test.param;
      return std::to_string(of.num_hosts) + "x" + std::to_string(of.num_ranks / of.num_hosts) +
             (of.num_threads == 1 ? "OneThread" : "SeveralThreads");
    });

TEST(LayerMemory, ARankWithoutMemoryForItsContextFailsTheCallOnAll) {
  const Problem problem = make_problem(spec_with_tokens({40, 40}));
  const LayerTensors clean = run_layer(problem, {});
  const LayerTensors after =
      run_sessions(problem, {}, [](RankSession& session, Communicator& group) {
        if (group.rank() == 1) {
          const megamoe::testing::NoMemoryFrom no_memory(256);
          expect_error(ErrorCode::out_of_memory, {"memory is exhausted"},
                       [&] { session.forward(); });
        } else {
          expect_error(ErrorCode::out_of_memory, {"rank 1", "memory is exhausted"},
                       [&] { session.forward(); });
        }
        const CallContext context = session.forward();
        session.backward(context);
      });
  EXPECT_EQ(differing_tensors(after, clean), "");
}

}  // namespace
}  // namespace megamoe::verify
