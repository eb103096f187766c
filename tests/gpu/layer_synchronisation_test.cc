// No call of the layer waits for a device: none of CUDA's functions that do, or may, is called.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include "gpu/beside_dx.h"
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

void expect_none_in_a_step(const Problem& problem, const RunOptions& options) {
  run_sessions(problem, options, [&](RankSession& session, Communicator& group) {
    UncheckedCalls calls(session, group);
    const auto steps = [&](int num_steps) {
      for (int step = 0; step < num_steps; ++step) calls.backward(calls.forward());
    };
    steps(3);  // builds contexts
    calls.synchronize();
    CallContext context;
    EXPECT_EQ(synchronizing_calls_of(group, [&] { context = calls.forward(); }), 0) << "forward";
    EXPECT_EQ(synchronizing_calls_of(group, [&] { calls.backward(context); }), 0) << "backward";
    context = {};
    EXPECT_EQ(synchronizing_calls_of(group, [&] { steps(5); }), 0);
    EXPECT_GT(synchronizing_calls_of(group, [&] { session.layer().check(calls.stream()); }), 0);
  });
}

TEST(CudaSynchronisation, IsCounted) {
  const std::int64_t before = num_synchronizing_calls();
  cudaDeviceSynchronize();
  EXPECT_EQ(num_synchronizing_calls(), before + 1);
}

void expect_none_in_a_step(const std::vector<std::int64_t>& tokens, const RunOptions& options) {
  SCOPED_TRACE(testing::Message() << testing::PrintToString(tokens) << ", overlap "
                                  << static_cast<int>(options.overlap) << ", mode "
                                  << static_cast<int>(options.memory_mode) << ", gradients "
                                  << static_cast<int>(options.weight_gradient_mode));
  expect_none_in_a_step(make_problem(spec_with_tokens(tokens)), options);
}

TEST(CudaSynchronisation, NoStepOfOneOrTwoRanksWaitsForADevice) {
  for (const std::vector<std::int64_t>& tokens :
       {std::vector<std::int64_t>{40}, {40, 21}, {0, 30}}) {
    for (const Overlap overlap : {Overlap::on, Overlap::off}) {
      for (const MemoryMode mode : {MemoryMode::saved, MemoryMode::recompute}) {
        for (const WeightGradientMode gradients :
             {WeightGradientMode::store_bf16, WeightGradientMode::accumulate_fp32}) {
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

/// The ranks above share a device where there is only one: these never do.
TEST(CudaSynchronisation, NoStepOfTwoRanksWithADeviceEachWaitsForOne) {
  if (num_cuda_devices() < 2) GTEST_SKIP() << "needs two devices";
  const Problem small = make_problem(spec_with_tokens({40, 21}));
  const Problem beside_dx = make_problem(spec_beside_dx(2));
  for (const Overlap overlap : {Overlap::on, Overlap::off}) {
    RunOptions options;
    options.overlap = overlap;
    expect_none_in_a_step(small, options);
    options = options_beside_dx();
    options.overlap = overlap;
    expect_none_in_a_step(beside_dx, options);
  }
}

}  // namespace
}  // namespace megamoe::verify
