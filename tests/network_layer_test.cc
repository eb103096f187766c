// The layer on several hosts gives the bits of one host: 2 x 2, 2 x 4 and 4 x 2 ranks, as threads
// and as processes, on the inputs that move rows between ranks in every way.
#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <functional>
#include <thread>

#include "comm/relay_layout.h"
#include "layer/workspace.h"
#include "layer_fixture.h"
#include "network_fixture.h"
#include "sanitized.h"

namespace megamoe::verify {
namespace {

/// Hosts x ranks of a host.
struct Layout {
  int num_hosts;
  int ranks_per_host;
  [[nodiscard]] int num_ranks() const { return num_hosts * ranks_per_host; }
};
constexpr Layout kLayouts[] = {{2, 2}, {2, 4}, {4, 2}};

std::string name_of(const Layout& layout) {
  return std::to_string(layout.num_hosts) + "x" + std::to_string(layout.ranks_per_host);
}

/// A problem for any number of ranks, and how it is run.
struct Case {
  const char* name;
  std::function<Problem(int num_ranks)> problem;
  RunOptions options = {};
};

ProblemSpec spec_of(std::vector<std::int64_t> tokens_per_rank, std::int32_t num_experts = 16,
                    std::int32_t top_k = 3) {
  ProblemSpec spec = spec_with_tokens(std::move(tokens_per_rank));
  spec.num_experts = num_experts;
  spec.top_k = top_k;
  return spec;
}

/// `pattern` repeated over the ranks.
std::vector<std::int64_t> tokens(int num_ranks, const std::vector<std::int64_t>& pattern) {
  std::vector<std::int64_t> tokens_R;
  for (int rank = 0; rank < num_ranks; ++rank) tokens_R.push_back(pattern[rank % pattern.size()]);
  return tokens_R;
}

Case routed(const char* name, RoutingPattern routing, std::vector<std::int64_t> pattern,
            RunOptions options = {}) {
  const auto problem = [=](int num_ranks) {
    ProblemSpec spec = spec_of(tokens(num_ranks, pattern));
    spec.routing = routing;
    return make_problem(spec);
  };
  return {name, problem, options};
}

/// ids(token, slot) for all tokens of all ranks.
Case with_ids(const char* name, std::vector<std::int64_t> pattern, std::int32_t top_k,
              const std::function<std::int32_t(std::int64_t, std::int32_t)>& id_of) {
  const auto problem = [=](int num_ranks) {
    Problem made = make_problem(spec_of(tokens(num_ranks, pattern), 16, top_k));
    std::vector<std::int32_t> ids(made.expert_ids_TK.size());
    for (std::size_t i = 0; i < ids.size(); ++i) {
      ids[i] = id_of(static_cast<std::int64_t>(i) / top_k, static_cast<std::int32_t>(i) % top_k);
    }
    set_routing(made, ids);
    return made;
  };
  return {name, problem, {}};
}

Case activated(const char* name, ActivationKind kind) {
  const auto problem = [=](int num_ranks) {
    ProblemSpec spec = spec_of(tokens(num_ranks, {9, 4}));
    spec.activation = {kind, 1.0F};
    return make_problem(spec);
  };
  return {name, problem, {}};
}

RunOptions with(MemoryMode mode, std::int64_t saved_rows = 0) {
  RunOptions options;
  options.memory_mode = mode;
  options.saved_row_capacity = saved_rows;
  return options;
}

RunOptions with(WeightGradientMode mode) {
  RunOptions options;
  options.weight_gradient_mode = mode;
  options.initial_gradient = 3.0F;
  return options;
}

std::vector<Case> all_cases() {
  using enum RoutingPattern;
  std::vector<Case> cases = {
      // A rank or a whole host without tokens; without any.
      routed("empty_ranks", uniform, {0, 16}),
      routed("full_first", uniform, {16, 0}),
      routed("empty_hosts", uniform, {0, 0, 0, 0, 7, 9, 1, 3}),
      routed("no_tokens", uniform, {0}),
      routed("uneven", uniform, {5, 12, 1, 100}),
      routed("tile_edges", uniform, {1, 2, 7, 8, 16, 32, 63, 64}),
      routed("tile_edges_beyond", uniform, {65, 127, 128, 129}),
      routed("skewed", skewed, {33, 20}),
      routed("one_expert", one_expert, {17, 30}),
      routed("duplicates", duplicates, {9, 31}),
      routed("holes", holes, {40, 21}),
      routed("ties", ties, {13}),
      // Every token to the first rank; to the last; only to the own host's or only to others'.
      with_ids("all_to_rank_0", {6, 11}, 2, [](auto, auto slot) { return slot; }),
      with_ids("all_to_the_last", {6, 11}, 2, [](auto, auto slot) { return 14 + slot; }),
      with_ids(
          "to_all_hosts", {6, 11}, 16,
          [](auto token, auto slot) { return static_cast<std::int32_t>((token + slot) % 16); }),
      with_ids("all_slots_one_expert", {4, 7}, 4,
               [](auto token, auto) { return static_cast<std::int32_t>(token % 16); }),
      with_ids("some_experts_empty", {8, 24}, 2,
               [](auto token, auto slot) {
                 return static_cast<std::int32_t>(1 + 2 * ((token + slot) % 4));
               }),
      with_ids("all_empty", {8, 3}, 2, [](auto, auto) { return -1; }),
      with_ids("one_slot", {8, 3}, 1,
               [](auto token, auto) { return static_cast<std::int32_t>((token * 5) % 16); }),
      {"odd_sizes",
       [](int num_ranks) {
         ProblemSpec spec = spec_of(tokens(num_ranks, {11, 20}), 8, 2);
         spec.hidden_dim = 45;
         spec.intermediate_dim = 176;
         return make_problem(spec);
       }},
      routed("recomputed", uniform, {21, 12}, with(MemoryMode::recompute)),
      routed("partly_saved", uniform, {21, 12}, with(MemoryMode::saved, 17)),
      routed("fp32_gradients", uniform, {21, 12}, with(WeightGradientMode::store_fp32)),
      routed("main_grad", uniform, {21, 12}, with(WeightGradientMode::accumulate_fp32)),
      activated("gelu_erf", ActivationKind::gelu_erf),
      activated("ungated", ActivationKind::relu2),
  };
  return cases;
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
  const LayerTensors hosts =
      run_sessions(problem, options, [&](RankSession& session, Communicator& group) {
        const auto poison_all = [&] {
          group.barrier("before poison", 60.0);
          poison(session.workspace());
          group.barrier("after poison", 60.0);
        };
        std::vector<CallContext> contexts;
        for (int i = 0; i < 3; ++i) {
          poison_all();
          contexts.push_back(session.forward());
        }
        for (const int i : {1, 2, 0}) {
          poison_all();
          session.backward(contexts[i]);
        }
      });
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
