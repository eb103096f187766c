// The layer on several hosts gives the bits of one host: 2 x 2, 2 x 4 and 4 x 2 ranks, as threads
// and as processes, on the inputs that move rows between ranks in every way.
#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <thread>

#include "comm/relay_layout.h"
#include "hosts_cases.h"
#include "hosts_scripts.h"
#include "layer/workspace.h"
#include "layer_fixture.h"
#include "network_fixture.h"
#include "sanitized.h"

namespace megamoe::verify {
namespace {

using Clock = std::chrono::steady_clock;

constexpr Layout kLayouts[] = {{2, 2}, {2, 4}, {4, 2}};
/// What may pass from the moment that a peer is known to be gone, or late, to the error.
constexpr std::chrono::seconds kGrace(4);

/// All, or every third with a sanitizer: most of them differ in values, not in accesses.
std::vector<Case> cases_of_this_build() {
  const std::vector<Case> all = all_cases();
  std::vector<Case> some;
  for (std::size_t i = 0; i < all.size(); i += less_if_sanitized(1, 3)) some.push_back(all[i]);
  return some;
}

RunOptions with_hosts(int num_hosts) {
  RunOptions options;
  options.num_hosts = num_hosts;
  return options;
}

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
  for (const Case& test : cases_of_this_build()) {
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
  const std::vector<Case> cases = cases_of_this_build();
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

TEST_P(Hosts, ThreadsGiveTheBitsOfOneRankInAnyOrderOfCalls) {
  expect_threads_give_the_bits_of_one_rank(GetParam());
}

TEST_P(Hosts, ProcessesGiveTheBitsOfOneRankInAnyOrderOfCalls) {
  const Layout layout = GetParam();
  const std::vector<Script> scripts = all_scripts();
  std::vector<std::vector<Problem>> problems;
  std::vector<std::vector<LayerTensors>> one_rank;
  for (const Script& script : scripts) {
    problems.push_back(script.problems(layout.num_ranks()));
    one_rank.push_back(script_on_one_rank(script, problems.back()));
  }
  const Topology topology = even_topology(layout.num_hosts, layout.ranks_per_host);
  expect_all_succeed(run_network_processes(topology, 60.0, [&](Communicator& group) {
    for (std::size_t i = 0; i < scripts.size(); ++i) {
      const auto tensors = run_script(scripts[i], problems[i], scripts[i].options, group);
      for (std::size_t j = 0; j < tensors.size(); ++j) {
        const LayerTensors expected = part_of(one_rank[i][j], problems[i][j].spec, group.rank());
        const std::string different = differing_tensors(tensors[j], expected);
        expect(different.empty(), (scripts[i].name + ": " + different).c_str());
      }
    }
    group.barrier("the end", 60.0);
  }));
}

TEST_P(Hosts, ProcessesRefuseWhatIsWrongAndStayUsable) {
  const Layout layout = GetParam();
  const Topology topology = even_topology(layout.num_hosts, layout.ranks_per_host);
  expect_all_succeed(run_network_processes(topology, 60.0, [&](Communicator& group) {
    for (const Refusal& refusal : kRefusals) {
      const std::string wrong = refusal.run({group, {}});
      expect(wrong.empty(), (refusal.name + (": " + wrong)).c_str());
    }
    group.barrier("the end", 60.0);
  }));
}

TEST_P(Hosts, TheSameStepAgainAndAgain) {
  const Layout layout = GetParam();
  const Problem problem = make_problem(spec_of(tokens(layout.num_ranks(), {3, 1, 4})));
  const int num_steps = less_if_sanitized(1000, 20);
  run_sessions(problem, with_hosts(layout.num_hosts), [&](RankSession& session, Communicator&) {
    session.backward(session.forward());
    const LayerTensors first = session.tensors();
    for (int step = 1; step < num_steps; ++step) {
      session.backward(session.forward());
      ASSERT_EQ(differing_tensors(session.tensors(), first), "") << "step " << step;
    }
  });
}

TEST_P(Hosts, ProcessesTakeTheSameStepAgainAndAgain) {
  const Layout layout = GetParam();
  const Problem problem = make_problem(spec_of(tokens(layout.num_ranks(), {3, 1, 4})));
  const std::vector<LayerTensors> expected = tensors_of_ranks(problem, with_hosts(1));
  const int num_steps = less_if_sanitized(1000, 20);
  const Topology topology = even_topology(layout.num_hosts, layout.ranks_per_host);
  expect_all_succeed(run_network_processes(topology, 60.0, [&](Communicator& group) {
    RankSession session(problem, {}, group);
    for (int step = 0; step < num_steps; ++step) {
      session.backward(session.forward());
      const std::string different = differing_tensors(session.tensors(), expected[group.rank()]);
      expect(different.empty(), ("step " + std::to_string(step) + ": " + different).c_str());
    }
    group.barrier("the end", 60.0);
  }));
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

TEST(HostsFailure, AProcessThatIsKilledInTrainingIsNamedOnEveryHost) {
  const Problem problem = make_problem(spec_of({6, 6, 6, 6}));
  const auto statuses = run_network_processes(even_topology(2, 2), 60.0, [&](Communicator& group) {
    RankSession session(problem, {}, group);
    Clock::time_point start;  // of the step
    const std::optional<Error> error = error_of([&] {
      for (int step = 0; step < 100'000; ++step) {
        if (group.rank() == 2 && step == 20) raise(SIGKILL);
        start = Clock::now();
        session.backward(session.forward());
      }
    });
    expect(error.has_value(), "an error");
    expect(error->code() == ErrorCode::peer_failed, error->what());
    expect(contains(*error, "rank 2"), error->what());
    expect(Clock::now() - start < kGrace, "at once");
  });
  EXPECT_TRUE(WIFSIGNALED(statuses[2]));
  for (const int rank : {0, 1, 3}) EXPECT_EQ(statuses[rank], 0) << rank;
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
      std::this_thread::sleep_for(std::chrono::seconds(6));
      _exit(0);
    }
    const Clock::time_point start = Clock::now();
    const std::optional<Error> error = error_of([&] { session.forward(); });
    expect(error.has_value(), "an error");
    expect(Clock::now() - start < std::chrono::seconds(1) + kGrace, "at the deadline");
    expect(error->code() == ErrorCode::deadline_exceeded, error->what());
    expect(contains(*error, "missing: rank 3"), error->what());
  });
  for (const int rank : {0, 1, 2}) EXPECT_EQ(statuses[rank], 0) << rank;
}

}  // namespace
}  // namespace megamoe::verify
