// CudaRouter's backward against fp64, its bits, and a training step in a graph.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "gpu/gpu_test.h"
#include "gpu/router_device.h"

namespace megamoe::testing {
namespace {

class CudaRouterBackward : public GpuTest {};

/// By how much a token's gradients may differ: the error of a score times everything that is added.
double gradient_tolerance(const RouterBatch& batch, const std::vector<std::int32_t>& ids_TK,
                          std::int64_t token) {
  double sum = 0.0;
  for (std::int64_t i = token * batch.num_slots; i < (token + 1) * batch.num_slots; ++i) {
    if (ids_TK[i] >= 0) sum += std::abs(static_cast<double>(batch.d_weights_TK[i]));
  }
  const double aux = batch.config.aux_loss_alpha == 0.0F
                         ? 0.0
                         : static_cast<double>(batch.config.aux_loss_alpha) *
                               static_cast<double>(batch.config.num_experts) /
                               static_cast<double>(batch.num_tokens);
  return 2 * kScoreError * (2 * static_cast<double>(batch.config.scale) * sum + 2 * aux) + 1e-35;
}

/// Returns the largest gradient.
double expect_right_gradients(const RouterBatch& batch, const RouterResults& device) {
  const std::vector<double> expected = oracle_gradients(batch, device.ids_TK, device.load);
  EXPECT_EQ(expected.size(), device.d_logits_TE.size());
  double largest = 0.0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const auto token = static_cast<std::int64_t>(i) / batch.config.num_experts;
    const double error = std::abs(static_cast<double>(device.d_logits_TE[i]) - expected[i]);
    const double tolerance = gradient_tolerance(batch, device.ids_TK, token);
    largest = std::max(largest, std::abs(expected[i]));
    EXPECT_LE(error, tolerance) << "token " << token << ", expert "
                                << static_cast<std::int64_t>(i) % batch.config.num_experts;
    if (!(error <= tolerance)) break;
  }
  return largest;
}

enum class Ids { selected, forced };

void expect_all_right(Ids kind, float alpha) {
  unsigned seed = 100;
  for (RouterCase c : all_router_cases()) {
    c.config.aux_loss_alpha = alpha;
    SCOPED_TRACE(name_of(c));
    RouterBatch batch = make_batch(c.config, c.dtype, c.num_tokens, Logits::normal, ++seed);
    if (kind == Ids::forced) {
      force_ids(batch, seed);
      for (std::size_t i = 0; i < batch.forced_TK.size(); ++i) {
        // What lies in the gradient of an empty slot must not matter.
        if (batch.forced_TK[i] < 0) {
          batch.d_weights_TK[i] = std::numeric_limits<float>::quiet_NaN();
        }
      }
    }
    const RouterResults device = run_on_device(batch);
    const double largest = expect_right_gradients(batch, device);
    if (c.num_tokens > 1 && c.config.top_k > 1) {
      EXPECT_GT(largest, 1e-3);
    }
    if (::testing::Test::HasFailure()) return;
  }
}

TEST_F(CudaRouterBackward, OfSelectedIds) { expect_all_right(Ids::selected, 0.0F); }
TEST_F(CudaRouterBackward, OfSelectedIdsWithAuxiliaryLoss) {
  expect_all_right(Ids::selected, 0.5F);
}
TEST_F(CudaRouterBackward, OfRepeatedAndEmptySlots) { expect_all_right(Ids::forced, 0.0F); }
TEST_F(CudaRouterBackward, OfRepeatedAndEmptySlotsWithAuxiliaryLoss) {
  expect_all_right(Ids::forced, 0.5F);
}

/// One slot whose weight is one: nothing can be learnt, and no rounding error takes the place of 0.
TEST_F(CudaRouterBackward, OfASingleShareIsExactlyZero) {
  const RouterConfig config = router_config(128, 1, ScoreFunction::softmax, WeightNorm::sum_to_one);
  const RouterBatch batch = make_batch(config, DType::fp32, 257, Logits::normal, 21);
  for (const float gradient : run_on_device(batch).d_logits_TE) ASSERT_EQ(gradient, 0.0F);
}

/// Experts without a slot have none of a softmax over the slots.
TEST_F(CudaRouterBackward, OfASoftmaxOverSlotsReachesNoOtherExpert) {
  const RouterConfig config = router_config(60, 4, ScoreFunction::softmax, WeightNorm::sum_to_one);
  const RouterBatch batch = make_batch(config, DType::fp32, 100, Logits::normal, 22);
  const RouterResults device = run_on_device(batch);
  for (std::int64_t t = 0; t < 100; ++t) {
    const auto first = device.ids_TK.begin() + t * 4;
    for (std::int32_t j = 0; j < 60; ++j) {
      const float gradient = device.d_logits_TE[t * 60 + j];
      if (std::count(first, first + 4, j) == 0) {
        ASSERT_EQ(gradient, 0.0F);
      }
    }
  }
}

/// Scores that underflow have the gradient of their logits all the same.
TEST_F(CudaRouterBackward, OfExpertsWhoseScoresUnderflow) {
  const RouterConfig config = router_config(40, 4, ScoreFunction::softmax, WeightNorm::sum_to_one);
  RouterBatch batch = make_batch(config, DType::fp32, 8, Logits::normal, 23);
  for (std::int64_t t = 0; t < 8; ++t) batch.logits_TE[t * 40] = 500.0F;
  batch.ids_are_forced = true;
  batch.forced_TK.assign(32, 0);
  for (std::size_t i = 0; i < 32; ++i) batch.forced_TK[i] = static_cast<std::int32_t>(1 + i % 4);
  const RouterResults device = run_on_device(batch);
  const RouterResults cpu = run_on_cpu(batch);
  double largest = 0.0;
  for (std::size_t i = 0; i < cpu.d_logits_TE.size(); ++i) {
    const auto expected = static_cast<double>(cpu.d_logits_TE[i]);
    EXPECT_NEAR(static_cast<double>(device.d_logits_TE[i]), expected, 1e-5);
    largest = std::max(largest, std::abs(expected));
  }
  EXPECT_GT(largest, 1e-2);
  for (std::size_t i = 0; i < cpu.weights_TK.size(); ++i) {
    EXPECT_NEAR(device.weights_TK[i], cpu.weights_TK[i], 1e-5);
  }
}

TEST_F(CudaRouterBackward, TakesAnAbsentDerivativeOfTheAuxiliaryLossAsOne) {
  RouterConfig config = router_config(60, 4, ScoreFunction::sigmoid, WeightNorm::none);
  config.aux_loss_alpha = 0.5F;
  RouterBatch batch = make_batch(config, DType::fp32, 64, Logits::normal, 24);
  batch.d_aux_loss = 1.0F;
  const RouterResults with_one = run_on_device(batch);
  CudaRouter router(config, 0);
  DeviceRouting routing(batch);
  routing.run(router);
  routing.d_logits.poison();
  CudaRouterBackwardInputs inputs = routing.backward_inputs();
  inputs.d_aux_loss = {};
  router.backward(inputs, routing.d_logits.view());
  router.check();
  EXPECT_TRUE(same_bits(routing.d_logits.download(), with_one.d_logits_TE));
}

/// The loads of two ranks add up, and each rank's backward uses the sum.
TEST_F(CudaRouterBackward, OfARankUsesTheGlobalLoad) {
  RouterConfig config = router_config(16, 2, ScoreFunction::softmax, WeightNorm::none);
  config.aux_loss_alpha = 1.0F;
  const RouterBatch batch = make_batch(config, DType::fp32, 40, Logits::normal, 25);
  const RouterResults alone = run_on_device(batch);
  RouterBatch half = batch;
  half.num_tokens = 20;
  half.logits_TE.resize(20 * 16);
  half.d_weights_TK.resize(20 * 2);
  CudaRouter router(config, 0);
  DeviceRouting routing(half);
  router.forward(routing.inputs(), routing.outputs());
  routing.load.upload(alone.load);
  router.backward(routing.backward_inputs(), routing.d_logits.view());
  router.check();
  const std::vector<float> gradients = routing.d_logits.download();
  EXPECT_TRUE(std::equal(gradients.begin(), gradients.end(), alone.d_logits_TE.begin()));
}

void expect_same_bits(const RouterResults& left, const RouterResults& right) {
  EXPECT_EQ(left.ids_TK, right.ids_TK);
  EXPECT_TRUE(same_bits(left.weights_TK, right.weights_TK));
  EXPECT_TRUE(same_bits(left.load, right.load));
  EXPECT_TRUE(same_bits(left.d_logits_TE, right.d_logits_TE));
  EXPECT_EQ(left.aux_loss, right.aux_loss);
}

RouterConfig large_config(ScoreFunction function) {
  RouterConfig config = router_config(256, 8, function, WeightNorm::sum_to_one, 8, 4);
  config.aux_loss_alpha = 0.01F;
  return config;
}

TEST_F(CudaRouterBackward, TwoHundredStepsGiveEqualBits) {
  for (const ScoreFunction function : {ScoreFunction::softmax, ScoreFunction::sigmoid}) {
    const RouterBatch batch =
        make_batch(large_config(function), DType::bf16, 2057, Logits::normal, 26);
    CudaRouter router(batch.config, 0);
    DeviceRouting routing(batch);
    routing.run(router);
    router.check();
    const RouterResults first = routing.results();
    for (int repetition = 0; repetition < 200; ++repetition) {
      routing.clear_outputs();
      routing.run(router);
      router.check();
      expect_same_bits(routing.results(), first);
      if (::testing::Test::HasFailure()) return;
    }
  }
}

class TestStream {
 public:
  TestStream() {
    cuda::check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
  }
  TestStream(const TestStream&) = delete;
  TestStream& operator=(const TestStream&) = delete;
  ~TestStream() { cudaStreamDestroy(stream_); }
  [[nodiscard]] cudaStream_t get() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

/// A capture shows that no call synchronises or allocates: it would fail. What a graph's inputs
/// hold when it is replayed counts, and what it finds wrong is reported.
TEST_F(CudaRouterBackward, AStepIsCapturedInAGraph) {
  const RouterConfig config = large_config(ScoreFunction::softmax);
  const RouterBatch batch = make_batch(config, DType::fp32, 257, Logits::normal, 27);
  const RouterBatch other = make_batch(config, DType::fp32, 257, Logits::normal, 28);
  const RouterResults expected = run_on_device(batch);
  const RouterResults expected_of_other = [&] {
    RouterBatch with_bias = other;
    with_bias.bias_E = batch.bias_E;
    with_bias.d_weights_TK = batch.d_weights_TK;
    return run_on_device(with_bias);
  }();
  CudaRouter router(config, 0);
  DeviceRouting routing(batch);
  const TestStream stream;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  cuda::check(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal), "capture");
  routing.run(router, {stream.get()});
  cuda::check(cudaStreamEndCapture(stream.get(), &graph), "capture");
  cuda::check(cudaGraphInstantiate(&executable, graph, 0), "instantiate");
  for (const bool swapped : {false, true, false, false}) {
    routing.logits_fp32.upload(swapped ? other.logits_TE : batch.logits_TE);
    routing.clear_outputs();
    cuda::check(cudaGraphLaunch(executable, stream.get()), "replay");
    router.check({stream.get()});
    expect_same_bits(routing.results(), swapped ? expected_of_other : expected);
  }
  std::vector<float> bad = batch.logits_TE;
  bad[100 * 256 + 7] = std::numeric_limits<float>::quiet_NaN();
  routing.logits_fp32.upload(bad);
  cuda::check(cudaGraphLaunch(executable, stream.get()), "replay");
  EXPECT_THROW(router.check({stream.get()}), Error);
  routing.logits_fp32.upload(batch.logits_TE);
  routing.clear_outputs();
  cuda::check(cudaGraphLaunch(executable, stream.get()), "replay");
  router.check({stream.get()});
  expect_same_bits(routing.results(), expected);
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
}

/// Calls on several streams run in the order in which they were enqueued, so that one may read what
/// another wrote.
TEST_F(CudaRouterBackward, CallsOnSeveralStreamsKeepTheirOrder) {
  const RouterBatch batch =
      make_batch(large_config(ScoreFunction::sigmoid), DType::fp32, 4001, Logits::normal, 29);
  const RouterResults expected = run_on_device(batch);
  CudaRouter router(batch.config, 0);
  DeviceRouting routing(batch);
  const TestStream first;
  const TestStream second;
  for (int repetition = 0; repetition < 20; ++repetition) {
    routing.clear_outputs();
    router.forward(routing.inputs(), routing.outputs(), {first.get()});
    router.add_load(routing.logits(), routing.ids.view(), routing.load.vector_view(),
                    {second.get()});
    router.aux_loss(routing.load.vector_view(), routing.aux_loss.vector_view(), {first.get()});
    router.backward(routing.backward_inputs(), routing.d_logits.view(), {second.get()});
    router.check({first.get()});  // waits for the second stream's calls, too
    expect_same_bits(routing.results(), expected);
    if (::testing::Test::HasFailure()) return;
  }
}

}  // namespace
}  // namespace megamoe::testing
