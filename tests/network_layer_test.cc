// The layer on several hosts gives the bits of one host: 2 x 2, 2 x 4 and 4 x 2 ranks, as threads
// and as processes, on the inputs that move rows between ranks in every way.
#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <thread>

#include "comm/relay_layout.h"
#include "hosts_cases.h"
#include "layer/workspace.h"
#include "layer_fixture.h"
#include "network_fixture.h"
#include "sanitized.h"

namespace megamoe::verify {
namespace {

constexpr Layout kLayouts[] = {{2, 2}, {2, 4}, {4, 2}};

/// What each rank holds after a forward and a backward call.
std::vector<LayerTensors> tensors_of_ranks(const Problem& problem, const RunOptions& options) {
  std::vector<LayerTensors> tensors_R(problem.spec.num_ranks());
  run_sessions(problem, options, [&](RankSession& session, Communicator& group) {
    session.backward(session.forward());
    tensors_R[group.rank()] = session.tensors();
  });
  return tensors_R;
}

class Hosts : public testing::TestWithParam<Layout> {};

TEST_P(Hosts, ThreadsGiveTheBitsOfOneHost) {
  const Layout layout = GetParam();
  for (const Case& test : all_cases()) {
    SCOPED_TRACE(test.name);
    const Problem problem = test.problem(layout.num_ranks());
    RunOptions options = test.options;
    options.num_hosts = 1;
    const LayerTensors one_host = run_layer(problem, options);
    options.num_hosts = layout.num_hosts;
    const LayerTensors hosts = run_layer(problem, options);
    EXPECT_EQ(differing_tensors(hosts, one_host), "");
    expect_right(problem, hosts, options);
  }
}

TEST_P(Hosts, ProcessesGiveTheBitsOfOneHost) {
  const Layout layout = GetParam();
  const std::vector<Case> cases = all_cases();
  std::vector<Problem> problems;
  std::vector<std::vector<LayerTensors>> expected;
  for (const Case& test : cases) {
    problems.push_back(test.problem(layout.num_ranks()));
    RunOptions options = test.options;
    options.num_hosts = 1;
    expected.push_back(tensors_of_ranks(problems.back(), options));
  }
  const Topology topology = even_topology(layout.num_hosts, layout.ranks_per_host);
  expect_all_succeed(run_network_processes(topology, 60.0, [&](Communicator& group) {
    for (std::size_t i = 0; i < cases.size(); ++i) {
      RankSession session(problems[i], cases[i].options, group);
      session.backward(session.forward());
      const std::string different = differing_tensors(session.tensors(), expected[i][group.rank()]);
      expect(different.empty(), (cases[i].name + (": " + different)).c_str());
    }
    group.barrier("the end", 60.0);
  }));
}

TEST_P(Hosts, ContextsInAnyOrderAndPoisonedMemory) {
  const Layout layout = GetParam();
  const Problem problem = make_problem(spec_of(tokens(layout.num_ranks(), {12, 5, 0, 9})));
  RunOptions options;
  options.num_hosts = 1;
  const LayerTensors one_host = run_layer(problem, options);
  options.num_hosts = layout.num_hosts;
  const LayerTensors hosts = run_contexts_in_any_order(problem, options);
  EXPECT_EQ(differing_tensors(hosts, one_host), "");
}

TEST_P(Hosts, TheSameStepAgainAndAgain) {
  const Layout layout = GetParam();
  const Problem problem = make_problem(spec_of(tokens(layout.num_ranks(), {3, 1, 4})));
  RunOptions options;
  options.num_hosts = layout.num_hosts;
  const int num_steps = less_if_sanitized(1000, 20);
  run_sessions(problem, options, [&](RankSession& session, Communicator&) {
    session.backward(session.forward());
    const LayerTensors first = session.tensors();
    for (int step = 1; step < num_steps; ++step) {
      session.backward(session.forward());
      ASSERT_EQ(differing_tensors(session.tensors(), first), "") << "step " << step;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Layouts, Hosts, testing::ValuesIn(kLayouts),
                         [](const auto& test) { return name_of(test.param); });

TEST(HostsWorkspace, IsAsLargeAsStated) {
  const LayerConfig config = layer_config(spec_of({4, 4, 4, 4}), {});
  run_ranks(even_topology(2, 2), [&](Communicator& group) {
    const Workspace workspace(config, group);
    const WorkspaceBytes bytes = workspace_bytes(config, group.topology());
    EXPECT_EQ(workspace.bytes().symmetric, bytes.symmetric);
    EXPECT_EQ(workspace.bytes().local, bytes.local);
    EXPECT_EQ(workspace.impl().symmetric->bytes(), static_cast<std::size_t>(bytes.symmetric));
  });
  const WorkspaceBytes one_host = workspace_bytes(config, 4);
  EXPECT_EQ(workspace_bytes(config, Topology(4)).total(), one_host.total());
  EXPECT_EQ(workspace_bytes(config, even_topology(4, 1)).symmetric, 4 * one_host.symmetric);
}

TEST(HostsFailure, BadIdsAndCapacityAreErrorsOnEveryHostAndLeaveTheLayerUsable) {
  const Problem good = make_problem(spec_of({6, 6, 6, 6}));
  Problem bad = good;
  bad.expert_ids_TK[3 * 6 * 3 + 4] = 16;  // rank 3, token 1, slot 1
  RunOptions options;
  options.num_hosts = 2;
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
    expect_error(ErrorCode::capacity_exceeded, {"its capacity is 10"}, [&] { session.forward(); });
    expect_error(ErrorCode::capacity_exceeded, {"its capacity is 10"}, [&] { session.forward(); });
  });
}

TEST(HostsFailure, DifferentCallsAreRefusedAndTheGroupStaysUsable) {
  const Problem problem = make_problem(spec_of({6, 6, 6, 6}));
  RunOptions options;
  options.num_hosts = 2;
  run_sessions(problem, options, [&](RankSession& session, Communicator& group) {
    const CallContext context = session.forward();
    expect_error(ErrorCode::config_mismatch, {"different calls", "rank 3"}, [&] {
      group.rank() == 3 ? session.backward(context) : static_cast<void>(session.forward());
    });
    session.backward(session.forward());
  });
}

TEST(HostsFailure, AProcessThatIsKilledInTrainingIsNamedOnEveryHost) {
  const Problem problem = make_problem(spec_of({6, 6, 6, 6}));
  const auto start = std::chrono::steady_clock::now();
  const auto statuses = run_network_processes(even_topology(2, 2), 60.0, [&](Communicator& group) {
    RankSession session(problem, {}, group);
    const std::optional<Error> error = error_of([&] {
      for (int step = 0; step < 100'000; ++step) {
        if (group.rank() == 2 && step == 20) raise(SIGKILL);
        session.backward(session.forward());
      }
    });
    expect(error.has_value(), "an error");
    expect(error->code() == ErrorCode::peer_failed, error->what());
    expect(contains(*error, "rank 2"), error->what());
  });
  EXPECT_TRUE(WIFSIGNALED(statuses[2]));
  for (const int rank : {0, 1, 3}) EXPECT_EQ(statuses[rank], 0) << rank;
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(30));
}

TEST(HostsFailure, AProcessThatStallsIsADeadlineThatNamesItOnEveryHost) {
  const Problem problem = make_problem(spec_of({6, 6, 6, 6}));
  RunOptions options;
  options.deadline_s = 1.0;
  const auto statuses = run_network_processes(even_topology(2, 2), 60.0, [&](Communicator& group) {
    RankSession session(problem, options, group);
    session.backward(session.forward());
    if (group.rank() == 3) {
      // Its connections stay open until all others have given up.
      std::this_thread::sleep_for(std::chrono::seconds(4));
      _exit(0);
    }
    const std::optional<Error> error = error_of([&] { session.forward(); });
    expect(error.has_value(), "an error");
    expect(error->code() == ErrorCode::deadline_exceeded, error->what());
    expect(contains(*error, "missing: rank 3"), error->what());
  });
  for (const int rank : {0, 1, 2}) EXPECT_EQ(statuses[rank], 0) << rank;
}

}  // namespace
}  // namespace megamoe::verify
