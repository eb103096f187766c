// Case 28: kernels of other streams hold multiprocessors while the layer runs.
#include <gtest/gtest.h>

#include <optional>

#include "gpu/beside_dx.h"
#include "gpu/held_multiprocessors.h"
#include "gpu/layer_device.h"

namespace megamoe::verify {
namespace {

struct Occupation {
  int num_ranks;
  Overlap overlap;
  MemoryMode memory_mode;
  WeightGradientMode gradients = WeightGradientMode::store_bf16;
};

class Case28HeldMultiprocessors : public ::testing::TestWithParam<Occupation> {};

TEST_P(Case28HeldMultiprocessors, DoNotKeepTheLayerFromItsEnd) {
  const Occupation& of = GetParam();
  ProblemSpec spec = spec_with_tokens(std::vector<std::int64_t>(of.num_ranks, 700));
  spec.top_k = 4;
  RunOptions options;
  if (of.gradients == WeightGradientMode::accumulate_fp32) {
    spec = spec_beside_dx(of.num_ranks);
    options = options_beside_dx();
  }
  spec.hidden_dim = 512;
  spec.intermediate_dim = 256;
  const Problem problem = make_problem(spec);
  options.overlap = of.overlap;
  options.memory_mode = of.memory_mode;
  options.deadline_s = 5.0;
  run_sessions(problem, options, [&](RankSession& session, Communicator& group) {
    const auto step = [&] {
      RankData data(problem, options, group.rank());  // gradients are added to new ones
      const CallContext context = data.forward(session.layer());
      data.backward(session.layer(), context);
      return data.tensors();
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
                                           Occupation{2, Overlap::off, MemoryMode::saved},
                                           Occupation{1, Overlap::on, MemoryMode::saved,
                                                      WeightGradientMode::accumulate_fp32},
                                           Occupation{2, Overlap::on, MemoryMode::saved,
                                                      WeightGradientMode::accumulate_fp32}));

}  // namespace
}  // namespace megamoe::verify
