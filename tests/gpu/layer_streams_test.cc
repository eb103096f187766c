// Which streams and captures calls take, and that calls of all streams keep their order.
#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "gpu/beside_dx.h"
#include "gpu/layer_device.h"
#include "gpu/unchecked_calls.h"
#include "layer/workspace.h"

namespace megamoe::verify {
namespace {

using cuda::check;

constexpr std::chrono::milliseconds kDelay{200};

/// What is enqueued on the stream afterwards begins kDelay later.
void delay(cudaStream_t stream) {
  check(cudaLaunchHostFunc(
            stream, [](void*) { std::this_thread::sleep_for(kDelay); }, nullptr),
        "a delay");
}

CallContext forward(MoeLayer& layer, const DeviceProblem& tensors, Stream stream) {
  return layer.forward(tensors.forward_input(), tensors.forward_output(), stream);
}
void backward(MoeLayer& layer, const CallContext& call, const DeviceProblem& tensors,
              Stream stream) {
  layer.backward(call, tensors.backward_input(), tensors.backward_output(), stream);
}

// The handle is the same on both threads, the stream is not.
TEST(CudaStreams, AThreadsOwnStreamsAreTwoStreams) {
  const Problem problem = make_problem(spec_with_tokens({40}));
  const DeviceProblem tensors(problem);
  OneRank rank(cuda_config(problem.spec));
  const Stream per_thread{cudaStreamPerThread};
  backward(rank.layer, forward(rank.layer, tensors, per_thread), tensors, per_thread);
  rank.layer.check(per_thread);
  const DeviceProblem::Bits wanted = tensors.bits();
  tensors.poison();
  delay(cudaStreamPerThread);
  const CallContext call = forward(rank.layer, tensors, per_thread);
  std::thread other([&] {
    check(cudaSetDevice(0), "device 0");
    backward(rank.layer, call, tensors, per_thread);
    rank.layer.check(per_thread);
  });
  other.join();
  rank.layer.check(per_thread);
  EXPECT_TRUE(tensors.bits().equal(wanted));
}

TEST(CudaStreams, CallsOfTwoWorkspacesRunInTheOrderOfTheirEnqueuing) {
  const Problem problem = make_problem(spec_with_tokens({40}));
  const DeviceProblem first(problem), second(problem);
  OneRank rank(cuda_config(problem.spec));
  Workspace other_workspace(cuda_config(problem.spec), *rank.group);
  MoeLayer other_layer(cuda_config(problem.spec), *rank.group, other_workspace);
  const TestStream stream, other;
  forward(rank.layer, first, stream);
  forward(other_layer, second, other);
  rank.layer.check(stream);
  const std::vector<bf16> wanted = first.y.download();
  first.poison();
  second.poison();
  delay(stream.get());
  forward(rank.layer, first, stream);
  forward(other_layer, second, other);
  std::this_thread::sleep_for(kDelay / 4);
  EXPECT_EQ(cudaStreamQuery(other.get()), cudaErrorNotReady) << "overtook the call before it";
  other_layer.check(other);
  EXPECT_TRUE(same_bits(first.y.download(), wanted));
  EXPECT_TRUE(same_bits(second.y.download(), wanted));
}

/// Case 24. One layer's calls on one stream, the other's on the other, the second's backward call
/// on the first's: none waits for the host, and call after call on one stream gives the same bits.
void expect_bits_of_one_by_one(const ProblemSpec& spec, const RunOptions& options) {
  const Problem first_problem = make_problem(spec);
  ProblemSpec other = spec;
  other.seed += 66;
  std::swap(other.tokens_per_rank.front(), other.tokens_per_rank.back());
  const Problem second_problem = make_problem(other);
  run_ranks(spec.num_ranks(), [&](Communicator& threads) {
    const BackendGroup group(threads, options);
    const LayerConfig config = layer_config(spec, options);
    Workspace workspace(config, group.get());
    MoeLayer first_layer(config, group.get(), workspace);
    MoeLayer second_layer(config, group.get(), workspace);
    poison(workspace);
    group.get().barrier("poisoned", 60);
    RankData first_data(first_problem, options, threads.rank());
    RankData second_data(second_problem, options, threads.rank());
    UncheckedCalls first(first_layer, first_data, group.get());
    UncheckedCalls second(second_layer, second_data, group.get());
    const auto one_by_one = [](MoeLayer& layer, UncheckedCalls& calls) {
      calls.reset();
      const CallContext call = calls.forward();
      layer.check(calls.stream());
      calls.backward(call);
      layer.check(calls.stream());
      return calls.download();
    };
    const LayerTensors wanted_of_first = one_by_one(first_layer, first);
    const LayerTensors wanted_of_second = one_by_one(second_layer, second);
    const cuda::CurrentDevice current(cuda_device_of(threads.rank(), threads.size()));
    for (int repeat = 0; repeat < 20; ++repeat) {
      first.reset();
      second.reset();
      second.synchronize();  // the first stream's calls write its gradients
      // What is enqueued on the other stream must not overtake these.
      if (repeat % 10 == 0) delay(first.cuda_stream());
      if (repeat % 10 == 5) delay(second.cuda_stream());
      const CallContext of_first = first.forward();
      const CallContext of_second = second.forward();
      first.backward(of_first);
      second.backward(of_second, repeat % 2 == 0 ? first.stream() : second.stream());
      first_layer.check(first.stream());
      second_layer.check(second.stream());
      EXPECT_EQ(differing_tensors(first.download(), wanted_of_first), "")
          << "first layer, repeat " << repeat << ", rank " << threads.rank();
      EXPECT_EQ(differing_tensors(second.download(), wanted_of_second), "")
          << "second layer, repeat " << repeat << ", rank " << threads.rank();
    }
  });
}

TEST(CudaCase24TwoLayers, OnTwoStreamsHaveTheBitsOfOneByOne) {
  for (const std::vector<std::int64_t>& tokens : {std::vector<std::int64_t>{120}, {120, 45}}) {
    for (const Overlap overlap : {Overlap::on, Overlap::off}) {
      for (const MemoryMode mode : {MemoryMode::saved, MemoryMode::recompute}) {
        SCOPED_TRACE(testing::Message()
                     << tokens.size() << " ranks, overlap " << static_cast<int>(overlap)
                     << ", mode " << static_cast<int>(mode));
        RunOptions options;
        options.overlap = overlap;
        options.memory_mode = mode;
        options.deadline_s = 10.0;
        expect_bits_of_one_by_one(spec_with_tokens(tokens), options);
      }
    }
  }
}

TEST(CudaCase24TwoLayers, WithGradientsBesideDxHaveTheBitsOfOneByOne) {
  for (const int num_ranks : {1, 2}) {
    SCOPED_TRACE(testing::Message() << num_ranks << " ranks");
    RunOptions options = options_beside_dx();
    options.deadline_s = 10.0;
    expect_bits_of_one_by_one(spec_beside_dx(num_ranks), options);
  }
}

TEST(CudaStreams, OfAnotherDeviceAreRefusedOnAllRanks) {
  if (num_cuda_devices() < 2) GTEST_SKIP() << "needs two devices";
  const Problem problem = make_problem(spec_with_tokens({12, 12}));
  const LayerTensors clean = run_layer(problem, {});
  const LayerTensors after =
      run_sessions(problem, {}, [&](RankSession& session, Communicator& group) {
        if (group.rank() == 0) {
          const cuda::CurrentDevice current(1);
          const TestStream stream;
          expect_error(ErrorCode::invalid_argument,
                       {"stream is of device 1", "rank is on device 0"},
                       [&] { session.layer().forward({}, {}, stream); });
        } else {
          expect_error(ErrorCode::invalid_argument, {"rank 0 refused"}, [&] { session.forward(); });
        }
        session.backward(session.forward());
      });
  EXPECT_EQ(differing_tensors(after, clean), "");
}

TEST(CudaGraphs, WhatACaptureDoesNotTakeIsRefusedAndLeavesItWhole) {
  const Problem problem = make_problem(spec_with_tokens({40}));
  const DeviceProblem tensors(problem), eager(problem);
  OneRank rank(cuda_config(problem.spec));
  const TestStream stream, other;
  std::vector<bf16> wanted;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  {
    const CallContext kept = forward(rank.layer, tensors, stream);
    rank.layer.check(stream);
    wanted = tensors.y.download();
    check(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal), "capture");
    expect_error(ErrorCode::invalid_argument, {"a context that exists already"},
                 [&] { forward(rank.layer, tensors, stream); });
    check(cudaStreamEndCapture(stream.get(), &graph), "a capture in which a call was refused");
    check(cudaGraphDestroy(graph), "cudaGraphDestroy");
  }
  check(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal), "capture");
  const CallContext call = forward(rank.layer, tensors, stream);
  expect_error(ErrorCode::invalid_argument, {"MoeLayer::check within a stream capture"},
               [&] { rank.layer.check(stream); });
  expect_error(ErrorCode::invalid_argument, {"a capture of another call on this workspace"},
               [&] { forward(rank.layer, eager, other); });
  check(cudaStreamEndCapture(stream.get(), &graph), "capture");
  check(cudaGraphInstantiate(&executable, graph, 0), "instantiate");
  tensors.poison();
  check(cudaGraphLaunch(executable, stream.get()), "replay");
  rank.layer.check(stream);
  EXPECT_TRUE(same_bits(tensors.y.download(), wanted));
  forward(rank.layer, eager, other);
  rank.layer.check(other);
  EXPECT_TRUE(same_bits(eager.y.download(), wanted));
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
}

}  // namespace
}  // namespace megamoe::verify
