// The layer of the CUDA backend over several hosts gives the bits of one host. Hosts are stand-ins:
// threads of this process, whose ranks exchange by copies, on one device.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cuda/runtime.h"
#include "gpu/hosts_ways.h"
#include "hosts_scripts.h"
#include "megamoe/cuda.h"

namespace megamoe::verify {
namespace {

/// Ranks that share a device, but for the first where there are two.
constexpr Layout kLayouts[] = {{2, 1}, {2, 2}, {2, 4}, {4, 2}};

/// Of the device of this rank.
std::size_t free_bytes(Communicator& threads) {
  const cuda::CurrentDevice current(cuda_device_of(threads.rank(), threads.size()));
  std::size_t free = 0, total = 0;
  cuda::check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  return free;
}

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

TEST_P(StandInHosts, GiveTheBitsOfOneRankInAnyOrderOfCalls) {
  expect_threads_give_the_bits_of_one_rank(GetParam());
}

TEST_P(StandInHosts, RefuseWhatIsWrongAndStayUsable) {
  const Layout layout = GetParam();
  run_ranks(even_topology(layout.num_hosts, layout.ranks_per_host), [&](Communicator& threads) {
    const RunOptions options;
    const BackendGroup group(threads, options);
    for (const Refusal& refusal : kRefusals) {
      EXPECT_EQ(refusal.run({group.get(), options}), "") << refusal.name;
    }
  });
}

/// Case 26.
TEST_P(StandInHosts, ForwardsWithoutABackwardTakeNoMemory) {
  const Layout layout = GetParam();
  const Problem problem = make_problem(spec_of(tokens(layout.num_ranks(), {12, 7})));
  run_ranks(even_topology(layout.num_hosts, layout.ranks_per_host), [&](Communicator& threads) {
    RankSession session(problem, {}, threads);
    const auto forwards_without_a_backward = [&](int count) {
      for (int i = 0; i < count; ++i) session.forward();
      threads.barrier("all have called", 60.0);
    };
    forwards_without_a_backward(10);
    const std::size_t before = free_bytes(threads);
    threads.barrier("all have looked", 60.0);
    forwards_without_a_backward(100);
    EXPECT_EQ(free_bytes(threads), before) << "rank " << threads.rank();
    threads.barrier("the end", 60.0);
  });
}

INSTANTIATE_TEST_SUITE_P(Layouts, StandInHosts, testing::ValuesIn(kLayouts),
                         [](const auto& test) { return name_of(test.param); });

TEST(StandInHostsFailure, OptionsThatDifferAreRefused) {
  run_ranks(even_topology(2, 1), [](Communicator& threads) {
    expect_error(ErrorCode::config_mismatch, {"network_groups", "rank 1 has 3"}, [&] {
      make_cuda_communicator(threads, 0, {.network_groups = threads.rank() == 1 ? 3 : 2});
    });
  });
}

}  // namespace
}  // namespace megamoe::verify
