// The layer of the CUDA backend over hosts that are processes gives the bits of one host.
#include <gtest/gtest.h>

#include <cstdlib>
#include <mutex>
#include <string>
#include <vector>

#include "gpu/host_process.h"
#include "gpu/host_processes.h"
#include "gpu/hosts_ways.h"
#include "hosts_scripts.h"

namespace megamoe::verify {
namespace {

constexpr double kDeadlineS = 20.0;

TEST(HostProcess, DISABLED_Cases) {
  const ThisHost host;
  const int num_ranks = host.layout.num_ranks();
  const std::vector<Case> cases = all_cases();
  std::vector<Problem> problems;
  std::vector<LayerTensors> one_rank;
  for (const Case& test : cases) {
    problems.push_back(test.problem(num_ranks));
    one_rank.push_back(result_of_one_rank(problems.back(), test.options));
  }
  std::mutex mutex;
  host.run([&](Communicator& group) {
    for (const RunOptions& way : ways_of(options_of(group))) {
      const BackendGroup joined(group, way);  // NCCL takes its time
      for (std::size_t i = 0; i < cases.size(); ++i) {
        RunOptions options = cases[i].options;
        options.group = &group;
        options.overlap = way.overlap;
        options.deadline_s = kDeadlineS;
        const LayerConfig config = layer_config(problems[i].spec, options);
        Workspace workspace(config, joined.get());
        MoeLayer layer(config, joined.get(), workspace);
        RankData data(problems[i], options, group.rank());
        data.backward(layer, data.forward(layer));
        const LayerTensors expected = part_of(one_rank[i], problems[i].spec, group.rank());
        const std::string different = differing_tensors(data.tensors(), expected);
        const std::lock_guard lock(mutex);
        EXPECT_EQ(different, "") << cases[i].name << ", " << way_text(way) << ", rank "
                                 << group.rank();
      }
    }
    group.barrier("the end", 60.0);
  });
}

/// Calls in other orders.
TEST(HostProcess, DISABLED_Scripts) {
  const ThisHost host;
  const std::vector<Script> scripts = all_scripts();
  std::vector<std::vector<Problem>> problems;
  std::vector<std::vector<LayerTensors>> one_rank;
  for (const Script& script : scripts) {
    problems.push_back(script.problems(host.layout.num_ranks()));
    one_rank.push_back(script_on_one_rank(script, problems.back()));
  }
  std::mutex mutex;
  host.run([&](Communicator& group) {
    for (const RunOptions& way : ways_of(options_of(group))) {
      const BackendGroup joined(group, way);
      for (std::size_t i = 0; i < scripts.size(); ++i) {
        RunOptions options = scripts[i].options;
        options.group = &group;
        options.overlap = way.overlap;
        options.deadline_s = kDeadlineS;
        const auto tensors = run_script(scripts[i], problems[i], options, joined.get());
        for (std::size_t j = 0; j < tensors.size(); ++j) {
          const LayerTensors expected = part_of(one_rank[i][j], problems[i][j].spec, group.rank());
          const std::string different = differing_tensors(tensors[j], expected);
          const std::lock_guard lock(mutex);
          EXPECT_EQ(different, "") << scripts[i].name << ", problem " << j << ", " << way_text(way)
                                   << ", rank " << group.rank();
        }
      }
    }
    group.barrier("the end", 60.0);
  });
}

TEST(HostProcess, DISABLED_Refusals) {
  const ThisHost host;
  std::mutex mutex;
  host.run([&](Communicator& group) {
    RunOptions options = options_of(group);
    options.deadline_s = kDeadlineS;
    const BackendGroup joined(group, options);
    for (const Refusal& refusal : kRefusals) {
      const std::string wrong = refusal.run({joined.get(), options});
      const std::lock_guard lock(mutex);
      EXPECT_EQ(wrong, "") << refusal.name << ", rank " << group.rank();
    }
    group.barrier("the end", 60.0);
  });
}

/// Of many tokens, so that results travel in several pieces and groups overlap.
TEST(HostProcess, DISABLED_ManyTokens) {
  const ThisHost host;
  ProblemSpec spec = spec_of(tokens(host.layout.num_ranks(), {1500, 1100}), 16, 8);
  spec.hidden_dim = 2048;
  spec.intermediate_dim = 256;
  const Problem problem = make_problem(spec);
  const LayerTensors one_rank = result_of_one_rank(problem, {});
  std::mutex mutex;
  host.run([&](Communicator& group) {
    const LayerTensors expected = part_of(one_rank, problem.spec, group.rank());
    for (const RunOptions& way : ways_of(options_of(group))) {
      RankSession session(problem, way, group);
      for (int i = 0; i < 3; ++i) {
        session.backward(session.forward());
        const std::string different = differing_tensors(session.tensors(), expected);
        const std::lock_guard lock(mutex);
        EXPECT_EQ(different, "") << way_text(way) << ", rank " << group.rank();
      }
    }
    group.barrier("the end", 60.0);
  });
}

TEST(HostProcess, DISABLED_ManySteps) {
  const ThisHost host;
  const Problem problem = make_problem(spec_of(tokens(host.layout.num_ranks(), {30, 1, 47})));
  const LayerTensors one_rank = result_of_one_rank(problem, {});
  const int num_steps = test_number("MEGAMOE_TEST_STEPS");
  std::mutex mutex;
  host.run([&](Communicator& group) {
    const LayerTensors expected = part_of(one_rank, problem.spec, group.rank());
    RankSession session(problem, options_of(group), group);
    for (int step = 0; step < num_steps; ++step) {
      session.backward(session.forward());
      const std::string different = differing_tensors(session.tensors(), expected);
      const std::lock_guard lock(mutex);
      ASSERT_EQ(different, "") << "step " << step << ", rank " << group.rank();
    }
    group.barrier("the end", 60.0);
  });
}

class ProcessesOfHosts : public OverTwoHosts {};

TEST_P(ProcessesOfHosts, GiveTheBitsOfOneHost) {
  expect_both_succeed("DISABLED_Cases", GetParam(), 150.0);
}
TEST_P(ProcessesOfHosts, GiveTheBitsOfOneHostWithManyTokens) {
  expect_both_succeed("DISABLED_ManyTokens", GetParam(), 60.0);
}
TEST_P(ProcessesOfHosts, GiveTheBitsOfOneHostInAnyOrderOfCalls) {
  expect_both_succeed("DISABLED_Scripts", GetParam(), 100.0);
}
TEST_P(ProcessesOfHosts, RefuseWhatIsWrongAndStayUsable) {
  expect_both_succeed("DISABLED_Refusals", GetParam(), 60.0);
}
TEST_P(ProcessesOfHosts, TheSameStepAgainAndAgain) {
  setenv("MEGAMOE_TEST_STEPS", GetParam().share_devices ? "50" : "1000", 1);
  expect_both_succeed("DISABLED_ManySteps", GetParam(), 100.0);
  unsetenv("MEGAMOE_TEST_STEPS");
}

INSTANTIATE_TEST_SUITE_P(RanksOfAHost, ProcessesOfHosts, testing::ValuesIn(kAllTwoHosts),
                         name_of_test);

}  // namespace
}  // namespace megamoe::verify
