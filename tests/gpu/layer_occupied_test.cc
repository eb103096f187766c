// Case 28: kernels of other streams hold multiprocessors while the layer runs.
#include <gtest/gtest.h>

#include <optional>

#include "gpu/held_multiprocessors.h"
#include "gpu/layer_device.h"

namespace megamoe::verify {
namespace {

struct Occupation {
  int num_ranks;
  Overlap overlap;
  MemoryMode memory_mode;
};

class Case28HeldMultiprocessors : public ::testing::TestWithParam<Occupation> {};

TEST_P(Case28HeldMultiprocessors, DoNotKeepTheLayerFromItsEnd) {
  const Occupation& of = GetParam();
  ProblemSpec spec = spec_with_tokens(std::vector<std::int64_t>(of.num_ranks, 700));
  spec.hidden_dim = 512;
  spec.intermediate_dim = 256;
  spec.top_k = 4;
  const Problem problem = make_problem(spec);
  RunOptions options;
  options.overlap = of.overlap;
  options.memory_mode = of.memory_mode;
  options.deadline_s = 5.0;
  run_sessions(problem, options, [&](RankSession& session, Communicator& group) {
    const auto step = [&] {
      const CallContext context = session.forward();
      session.backward(context);
      return session.tensors();
    };
    const LayerTensors wanted = step();
    const int device = cuda_device_of(group.rank(), group.size());
    const cuda::CurrentDevice current(device);
    const int all = multiprocessors_of(device);
    const bool holds = group.rank() == 0 || num_cuda_devices() >= group.size();
    // Ranks hold different numbers. A product needs two neighbours: a few more must be left.
    for (const int held : {all - 20, all / 2}) {
      std::optional<HeldMultiprocessors> kernel;
      if (holds) kernel.emplace(held - 4 * group.rank());
      group.barrier("multiprocessors are held", 60);
      EXPECT_EQ(differing_tensors(step(), wanted), "") << held << " held";
      group.barrier("all steps are done", 60);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ways, Case28HeldMultiprocessors,
                         ::testing::Values(Occupation{1, Overlap::on, MemoryMode::saved},
                                           Occupation{1, Overlap::off, MemoryMode::recompute},
                                           Occupation{2, Overlap::on, MemoryMode::recompute},
                                           Occupation{2, Overlap::on, MemoryMode::saved},
                                           Occupation{2, Overlap::off, MemoryMode::saved}));

}  // namespace
}  // namespace megamoe::verify
