// Calls over hosts while other kernels hold multiprocessors.
#include <gtest/gtest.h>

#include <optional>

#include "cuda/runtime.h"
#include "gpu/held_multiprocessors.h"
#include "gpu/host_process.h"
#include "gpu/host_processes.h"
#include "gpu/hosts_ways.h"

namespace megamoe::verify {
namespace {

/// While a kernel of another stream holds many multiprocessors of the first host's device, all but
/// what NCCL's kernels and a product's clusters of each of its ranks need.
TEST(HostProcess, DISABLED_HeldMultiprocessors) {
  const ThisHost host;
  ProblemSpec spec = spec_of(tokens(host.layout.num_ranks(), {700}), 8, 4);
  spec.hidden_dim = 512;
  spec.intermediate_dim = 256;
  const Problem problem = make_problem(spec);
  const LayerTensors one_rank = result_of_one_rank(problem, {});
  host.run([&](Communicator& group) {
    RunOptions options = options_of(group);
    options.deadline_s = 10.0;
    RankSession session(problem, options, group);
    const LayerTensors expected = part_of(one_rank, problem.spec, group.rank());
    const int device = cuda_device_of(group.topology(), group.rank());
    const cuda::CurrentDevice current(device);
    const int all = multiprocessors_of(device);
    session.backward(session.forward());
    for (const int held : {all - 32 * host.layout.ranks_per_host, all / 2}) {
      std::optional<HeldMultiprocessors> kernel;
      if (group.rank() == 0) kernel.emplace(held);
      group.barrier("multiprocessors are held", 60.0);
      session.backward(session.forward());
      EXPECT_EQ(differing_tensors(session.tensors(), expected), "") << held << " held";
      group.barrier("all steps are done", 60.0);
    }
  });
}

TEST(ProcessesOfHostsWithADevice, HeldMultiprocessorsDoNotKeepCallsFromTheirEnd) {
  for (const TwoHosts& layout : {kARankEach, kTwoOnADevice}) {
    SCOPED_TRACE(layout.name);
    expect_both_succeed("DISABLED_HeldMultiprocessors", layout, 60.0);
  }
}

}  // namespace
}  // namespace megamoe::verify
