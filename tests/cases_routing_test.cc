// Small inputs on which published MoE layers failed, where router and layer meet: the router's
// share of case 8, and case 27. (Case 18 is in the router's own tests.)
#include <gtest/gtest.h>

#include <algorithm>

#include "layer_fixture.h"
#include "verify/library_router.h"
#include "verify/verify.h"

namespace megamoe::verify {
namespace {

TEST(Case08DoubledIds, BothSlotsReachTheRouter) {
  for (const int num_ranks : {1, 2}) {
    for (const std::int64_t num_tokens : {1, 256, 257}) {
      SCOPED_TRACE(testing::Message() << "R=" << num_ranks << " T=" << num_tokens);
      ProblemSpec spec = spec_with_tokens(std::vector<std::int64_t>(num_ranks, num_tokens));
      spec.hidden_dim = spec.intermediate_dim = channels(32);
      spec.num_experts = 96;
      spec.top_k = 4;
      spec.routing = RoutingPattern::duplicates;  // ids are forced
      Problem problem = make_problem(spec);
      for (std::int64_t token = 0; token < spec.num_tokens(); ++token) {
        const std::int32_t ids[] = {5, 88, 88, 65};
        std::copy(std::begin(ids), std::end(ids), &problem.expert_ids_TK[token * 4]);
      }
      const auto comparisons = verify_backend(problem, {});
      EXPECT_TRUE(all_passed(comparisons)) << failures(comparisons);
      EXPECT_EQ(comparisons.back().name, "drouter");
    }
  }
}

TEST(Case27Ties, RouteTheSameWayTwiceAndRecomputeAgrees) {
  for (const int num_ranks : {1, 2}) {
    ProblemSpec spec = spec_with_tokens(std::vector<std::int64_t>(num_ranks, 50));
    spec.routing = RoutingPattern::ties;
    spec.top_k = 3;
    const Problem problem = make_problem(spec);
    const LibraryRouter first(problem);
    const LibraryRouter second(problem);
    EXPECT_EQ(first.routed().expert_ids_TK, second.routed().expert_ids_TK);
    EXPECT_EQ(first.routed().weights_TK, second.routed().weights_TK);
    for (std::size_t slot = 0; slot < first.routed().expert_ids_TK.size(); ++slot) {
      EXPECT_EQ(first.routed().expert_ids_TK[slot], static_cast<std::int32_t>(slot % 3));
    }

    const LayerTensors saved = run_layer(first.routed(), {});
    RunOptions options;
    options.memory_mode = MemoryMode::recompute;
    const LayerTensors recomputed =
        run_sessions(second.routed(), options, [](RankSession& session, Communicator&) {
          { const CallContext thrown_away = session.forward(); }  // activation checkpointing
          const CallContext context = session.forward();
          session.backward(context);
        });
    EXPECT_EQ(differing_tensors(saved, recomputed), "");
    expect_right(first.routed(), saved, {});
  }
}

TEST(Case27Ties, ARecomputeCanReuseIdsAndWeights) {
  // Near ties as well: ids of the first forward, forced into the second, give the same bits even if
  // a selection of its own might not.
  ProblemSpec spec = spec_with_tokens({70});
  spec.top_k = 3;
  const Problem problem = make_problem(spec);
  const LibraryRouter own_choice(problem);
  Problem forced = own_choice.routed();
  forced.spec.routing = RoutingPattern::duplicates;  // a pattern whose ids are imposed
  const LibraryRouter imposed(forced);
  EXPECT_EQ(imposed.routed().expert_ids_TK, own_choice.routed().expert_ids_TK);
  EXPECT_EQ(imposed.routed().weights_TK, own_choice.routed().weights_TK);
  EXPECT_EQ(differing_tensors(run_layer(imposed.routed(), {}), run_layer(own_choice.routed(), {})),
            "");
}

}  // namespace
}  // namespace megamoe::verify
