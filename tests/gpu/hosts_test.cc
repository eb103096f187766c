// The layer of the CUDA backend over several hosts gives the bits of one host. Hosts are stand-ins:
// threads of this process, whose ranks exchange by copies, on one device.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "gpu/hosts_ways.h"
#include "megamoe/cuda.h"

namespace megamoe::verify {
namespace {

/// Ranks that share a device, but for the first where there are two.
constexpr Layout kLayouts[] = {{2, 1}, {2, 2}, {2, 4}, {4, 2}};

class StandInHosts : public testing::TestWithParam<Layout> {};

TEST_P(StandInHosts, GiveTheBitsOfOneHost) {
  const Layout layout = GetParam();
  for (const Case& test : all_cases()) {
    SCOPED_TRACE(test.name);
    const Problem problem = test.problem(layout.num_ranks());
    const LayerTensors one_rank = result_of_one_rank(problem, test.options);
    for (RunOptions options : ways_of(test.options)) {
      SCOPED_TRACE(way_text(options));
      options.num_hosts = layout.num_hosts;
      const LayerTensors hosts = run_layer(problem, options);
      EXPECT_EQ(differing_tensors(hosts, one_rank), "");
      expect_right(problem, hosts, options);
    }
  }
}

TEST_P(StandInHosts, ContextsInAnyOrderAndPoisonedMemory) {
  const Layout layout = GetParam();
  const Problem problem = make_problem(spec_of(tokens(layout.num_ranks(), {12, 5, 0, 9})));
  RunOptions options;
  const LayerTensors one_rank = result_of_one_rank(problem, options);
  options.num_hosts = layout.num_hosts;
  const LayerTensors hosts = run_contexts_in_any_order(problem, options);
  EXPECT_EQ(differing_tensors(hosts, one_rank), "");
}

INSTANTIATE_TEST_SUITE_P(Layouts, StandInHosts, testing::ValuesIn(kLayouts),
                         [](const auto& test) { return name_of(test.param); });

TEST(StandInHostsFailure, BadIdsAndCapacityAreErrorsOnEveryHostAndLeaveTheLayerUsable) {
  const Problem good = make_problem(spec_of({6, 6, 6, 6}));
  Problem bad = good;
  bad.expert_ids_TK[3 * 6 * 3 + 4] = 16;  // rank 3, token 1, slot 1
  RunOptions options;
  const LayerTensors clean = run_layer(good, options);
  const LayerTensors after =
      run_sessions(good, options, [&](RankSession& session, Communicator& group) {
        RankData data(bad, options, group.rank());
        const std::string prefix = group.rank() == 3 ? "expert_ids[1, 1]" : "rank 3: expert_ids[1";
        expect_error(ErrorCode::expert_id_out_of_range, {prefix},
                     [&] { data.forward(session.layer()); });
        session.backward(session.forward());
      });
  EXPECT_EQ(differing_tensors(after, clean), "");

  options.row_capacity = 10;
  run_sessions(good, options, [&](RankSession& session, Communicator&) {
    for (int i = 0; i < 2; ++i) {
      expect_error(ErrorCode::capacity_exceeded, {"its capacity is 10"},
                   [&] { session.forward(); });
    }
  });
}

TEST(StandInHostsFailure, DifferentCallsAreRefusedAndTheGroupStaysUsable) {
  const Problem problem = make_problem(spec_of({6, 6, 6, 6}));
  run_sessions(problem, {}, [&](RankSession& session, Communicator& group) {
    const CallContext context = session.forward();
    expect_error(ErrorCode::config_mismatch, {"different calls", "rank 3"}, [&] {
      group.rank() == 3 ? session.backward(context) : static_cast<void>(session.forward());
    });
    session.backward(session.forward());
  });
}

TEST(StandInHostsFailure, OptionsThatDifferAreRefused) {
  run_ranks(even_topology(2, 1), [](Communicator& threads) {
    expect_error(ErrorCode::config_mismatch, {"network_groups", "rank 1 has 3"}, [&] {
      make_cuda_communicator(threads, 0, {.network_groups = threads.rank() == 1 ? 3 : 2});
    });
  });
}

}  // namespace
}  // namespace megamoe::verify
