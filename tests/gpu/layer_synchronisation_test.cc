// No call of the layer waits for a device: none of CUDA's functions that do, or may, is called.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include "gpu/synchronizing_calls.h"
#include "gpu/unchecked_calls.h"

namespace megamoe::verify {
namespace {

/// By all ranks together, while each runs `work`.
template <class Work>
std::int64_t synchronizing_calls_of(Communicator& group, const Work& work) {
  group.barrier("the count before", 60);
  const std::int64_t before = num_synchronizing_calls();
  group.barrier("the work", 60);
  work();
  group.barrier("the count after", 60);
  const std::int64_t after = num_synchronizing_calls();
  group.barrier("the end", 60);
  return after - before;
}

void expect_none_in_a_step(const std::vector<std::int64_t>& tokens, const RunOptions& options) {
  const Problem problem = make_problem(spec_with_tokens(tokens));
  run_sessions(problem, options, [&](RankSession& session, Communicator& group) {
    UncheckedCalls calls(session, group);
    const auto steps = [&](int num_steps) {
      for (int step = 0; step < num_steps; ++step) calls.backward(calls.forward());
    };
    steps(3);  // builds contexts
    calls.synchronize();
    EXPECT_EQ(synchronizing_calls_of(group, [&] { steps(5); }), 0);
    EXPECT_GT(synchronizing_calls_of(group, [&] { session.layer().check(calls.stream()); }), 0);
  });
}

TEST(CudaSynchronisation, IsCounted) {
  const std::int64_t before = num_synchronizing_calls();
  cudaDeviceSynchronize();
  EXPECT_EQ(num_synchronizing_calls(), before + 1);
}

TEST(CudaSynchronisation, NoStepOfOneOrTwoRanksWaitsForADevice) {
  for (const std::vector<std::int64_t>& tokens :
       {std::vector<std::int64_t>{40}, {40, 21}, {0, 30}}) {
    for (const Overlap overlap : {Overlap::on, Overlap::off}) {
      for (const MemoryMode mode : {MemoryMode::saved, MemoryMode::recompute}) {
        for (const WeightGradientMode gradients :
             {WeightGradientMode::store_bf16, WeightGradientMode::accumulate_fp32}) {
          SCOPED_TRACE(testing::Message()
                       << testing::PrintToString(tokens) << ", overlap "
                       << static_cast<int>(overlap) << ", mode " << static_cast<int>(mode)
                       << ", gradients " << static_cast<int>(gradients));
          RunOptions options;
          options.overlap = overlap;
          options.memory_mode = mode;
          options.weight_gradient_mode = gradients;
          expect_none_in_a_step(tokens, options);
        }
      }
    }
  }
}

}  // namespace
}  // namespace megamoe::verify
