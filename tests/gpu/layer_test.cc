// What only the CUDA backend has to show of arguments, graphs and streams.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <thread>

#include "gpu/layer_device.h"

namespace megamoe::verify {
namespace {

using cuda::check;

TEST(CudaArguments, MemoryOfTheHostAndUnalignedRowsAreRefusedByName) {
  const Problem problem = make_problem(spec_with_tokens({24}));
  const DeviceProblem tensors(problem);
  OneRank rank(cuda_config(problem.spec));
  const TestStream stream;
  const auto expect_refusal = [&](const std::vector<std::string>& texts,
                                  const std::function<void(ForwardInput&, ForwardOutput&)>& spoil) {
    ForwardInput input = tensors.forward_input();
    ForwardOutput output = tensors.forward_output();
    spoil(input, output);
    expect_error(ErrorCode::invalid_argument, texts,
                 [&] { rank.layer.forward(input, output, stream); });
  };
  expect_refusal({"x lies in host memory"},
                 [&](ForwardInput& input, ForwardOutput&) { input.x.data = problem.x_TH.data(); });
  expect_refusal({"expert_ids lies in host memory"}, [&](ForwardInput& input, ForwardOutput&) {
    input.expert_ids.data = problem.expert_ids_TK.data();
  });
  expect_refusal({"x", "16 bytes"},
                 [&](ForwardInput& input, ForwardOutput&) { input.x.data = tensors.x.data() + 1; });
  expect_refusal({"y", "multiple of 16 bytes"},
                 [&](ForwardInput&, ForwardOutput& output) { output.y.strides[0] += 1; });
  expect_refusal({"x", "multiple of 16 bytes"},
                 [&](ForwardInput& input, ForwardOutput&) { input.x.strides[0] = 1025; });
  expect_refusal({"experts.down", "16 bytes"}, [&](ForwardInput& input, ForwardOutput&) {
    input.experts.down.data = tensors.down.data() + 4;
  });
  // Still usable.
  const CallContext call =
      rank.layer.forward(tensors.forward_input(), tensors.forward_output(), stream);
  rank.layer.check(stream);
  EXPECT_EQ(call.num_rows(), 48);
}

TEST(CudaArguments, MemoryOfAnotherDeviceIsRefusedByName) {
  if (num_cuda_devices() < 2) GTEST_SKIP() << "needs two devices";
  const DeviceProblem tensors(make_problem(spec_with_tokens({24})));
  OneRank rank(cuda_config(spec_with_tokens({24})));
  const TestStream stream;
  const cuda::DeviceMemory elsewhere(1, 1 << 20, "a tensor of device 1");
  const std::string place = " lies on device 1; the layer's rank is on device 0";
  ForwardInput input = tensors.forward_input();
  input.x.data = elsewhere.data();
  expect_error(ErrorCode::invalid_argument, {"x" + place},
               [&] { rank.layer.forward(input, tensors.forward_output(), stream); });
  input = tensors.forward_input();
  input.experts.up.data = elsewhere.data();
  expect_error(ErrorCode::invalid_argument, {"experts.up" + place},
               [&] { rank.layer.forward(input, tensors.forward_output(), stream); });
  const CallContext call =
      rank.layer.forward(tensors.forward_input(), tensors.forward_output(), stream);
  BackwardOutput gradients = tensors.backward_output();
  gradients.dx.data = elsewhere.data();
  expect_error(ErrorCode::invalid_argument, {"dx" + place},
               [&] { rank.layer.backward(call, tensors.backward_input(), gradients, stream); });
  rank.layer.backward(call, tensors.backward_input(), tensors.backward_output(), stream);
  rank.layer.check(stream);
}

// Case 19.
TEST(CudaArguments, OtherTypesAreRefusedByName) {
  const DeviceProblem tensors(make_problem(spec_with_tokens({24})));
  OneRank rank(cuda_config(spec_with_tokens({24})));
  const TestStream stream;
  const auto expect_refusal = [&](const char* name, DType dtype, ErrorCode code,
                                  ConstTensorView ForwardInput::*tensor) {
    ForwardInput input = tensors.forward_input();
    (input.*tensor).dtype = dtype;
    expect_error(code, {name, to_string(dtype)},
                 [&] { rank.layer.forward(input, tensors.forward_output(), stream); });
  };
  const ErrorCode invalid = ErrorCode::invalid_argument;
  expect_refusal("expert_ids", DType::int64, invalid, &ForwardInput::expert_ids);
  expect_refusal("weights", DType::fp64, invalid, &ForwardInput::weights);
  expect_refusal("weights", DType::bf16, invalid, &ForwardInput::weights);
  expect_refusal("x", DType::fp32, invalid, &ForwardInput::x);
  expect_refusal("x", DType::fp16, ErrorCode::unsupported, &ForwardInput::x);
  rank.layer.forward(tensors.forward_input(), tensors.forward_output(), stream);
  rank.layer.check(stream);
}

TEST(CudaArguments, AHostCommunicatorOrAMissingDeviceIsRefused) {
  const auto threads = make_thread_communicators(1);
  const LayerConfig config = cuda_config(spec_with_tokens({24}));
  expect_error(ErrorCode::invalid_argument, {"make_cuda_communicator"},
               [&] { const Workspace workspace(config, *threads[0]); });
  expect_error(ErrorCode::invalid_argument, {"device is 99"},
               [&] { make_cuda_communicator(*threads[0], 99); });
}

TEST(CudaArguments, RanksThatShareADeviceAreRefusedWhereTheyHaveTooFewQueues) {
  constexpr const char* kVariable = "CUDA_DEVICE_MAX_CONNECTIONS";  // layer_main.cc has set it
  const std::string queues = std::getenv(kVariable);
  setenv(kVariable, "3", 1);
  std::atomic<int> refusals = 0;
  run_ranks(2, [&](Communicator& threads) {
    expect_error(ErrorCode::unsupported, {"2 ranks share CUDA device 0", "need 4", kVariable},
                 [&] { make_cuda_communicator(threads, 0); });
    ++refusals;
    threads.barrier("both were refused", 60);
    if (threads.rank() == 0) setenv(kVariable, queues.c_str(), 1);
    threads.barrier("the variable is as it was", 60);
    EXPECT_NO_THROW(make_cuda_communicator(threads, 0));
  });
  EXPECT_EQ(refusals, 2);
}

TEST(CudaArguments, StridedTokensAndFusedWeightsAreReadInPlace) {
  const Problem problem = make_problem(spec_with_tokens({40}));
  const DeviceProblem dense(problem);
  OneRank rank(cuda_config(problem.spec));
  const TestStream stream;
  const CallContext call =
      rank.layer.forward(dense.forward_input(), dense.forward_output(), stream);
  rank.layer.backward(call, dense.backward_input(), dense.backward_output(), stream);
  rank.layer.check(stream);

  const std::int64_t T = dense.T, H = dense.H, I = dense.I, E = dense.E;
  std::vector<bf16> wide(T * (H + 8));
  for (std::int64_t t = 0; t < T; ++t) {
    std::copy_n(&problem.x_TH[t * H], H, &wide[t * (H + 8)]);
  }
  std::vector<bf16> fused(E * 2 * I * H);
  for (std::int64_t e = 0; e < E; ++e) {
    std::copy_n(&problem.gate_EIH[e * I * H], I * H, &fused[e * 2 * I * H]);
    std::copy_n(&problem.up_EIH[e * I * H], I * H, &fused[(e * 2 + 1) * I * H]);
  }
  const OnDevice<bf16> wide_x(wide), fused_weights(fused), fused_gradients(E * 2 * I * H);
  const DeviceProblem strided(problem);
  const TensorView weights = fused_weights.view({E, 2 * I, H});
  const TensorView gradients = fused_gradients.view({E, 2 * I, H});
  ForwardInput input = strided.forward_input();
  input.x = wide_x.view({T, H});
  input.x.strides[0] = H + 8;
  input.experts.gate = expert_rows(ConstTensorView(weights), 0, I);
  input.experts.up = expert_rows(ConstTensorView(weights), I, I);
  BackwardInput backward = strided.backward_input();
  backward.x = input.x;
  backward.experts = input.experts;
  BackwardOutput output = strided.backward_output();
  output.experts.gate = expert_rows(gradients, 0, I);
  output.experts.up = expert_rows(gradients, I, I);
  const CallContext again = rank.layer.forward(input, strided.forward_output(), stream);
  rank.layer.backward(again, backward, output, stream);
  rank.layer.check(stream);
  EXPECT_TRUE(same_bits(strided.y.download(), dense.y.download()));
  EXPECT_TRUE(same_bits(strided.dx.download(), dense.dx.download()));
  for (std::int64_t e = 0; e < E; ++e) {
    EXPECT_TRUE(same_bits(fused_gradients.download(e * 2 * I * H, I * H),
                          dense.dgate.download(e * I * H, I * H)));
    EXPECT_TRUE(same_bits(fused_gradients.download((e * 2 + 1) * I * H, I * H),
                          dense.dup.download(e * I * H, I * H)));
  }
}

// Case 22: one row for all tokens, as torch's expand() gives it.
TEST(CudaArguments, ExpandedGradientsAreRead) {
  Problem problem = make_problem(spec_with_tokens({40}));
  for (std::size_t i = 64; i < problem.dy_TH.size(); ++i) problem.dy_TH[i] = problem.dy_TH[i % 64];
  const DeviceProblem dense(problem), expanded(problem);
  for (const Overlap overlap : {Overlap::on, Overlap::off}) {
    LayerConfig config = cuda_config(problem.spec);
    config.overlap = overlap;
    OneRank rank(config);
    const TestStream stream;
    const auto step = [&](const DeviceProblem& tensors, std::int64_t row_stride) {
      tensors.poison();
      BackwardInput input = tensors.backward_input();
      input.dy.strides[0] = row_stride;
      const CallContext call =
          rank.layer.forward(tensors.forward_input(), tensors.forward_output(), stream);
      rank.layer.backward(call, input, tensors.backward_output(), stream);
      rank.layer.check(stream);
      return tensors.bits();
    };
    EXPECT_TRUE(step(expanded, 0).equal(step(dense, 64)));
  }
}

TEST(CudaArguments, ExpertsThatShareWeightsAreReadInPlace) {
  Problem problem = make_problem(spec_with_tokens({40}));
  const std::int64_t matrix = problem.spec.hidden_dim * problem.spec.intermediate_dim;
  for (std::vector<bf16>* weights : {&problem.gate_EIH, &problem.up_EIH, &problem.down_EHI}) {
    for (int expert = 1; expert < problem.spec.num_experts; ++expert) {
      std::copy_n(weights->data(), matrix, weights->data() + expert * matrix);
    }
  }
  const DeviceProblem copies(problem), shared(problem);
  OneRank rank(cuda_config(problem.spec));
  const TestStream stream;
  const auto step = [&](const DeviceProblem& tensors, std::int64_t expert_stride) {
    ForwardInput input = tensors.forward_input();
    BackwardInput backward = tensors.backward_input();
    for (ExpertWeights* experts : {&input.experts, &backward.experts}) {
      for (ConstTensorView* weights : {&experts->gate, &experts->up, &experts->down}) {
        weights->strides[0] = expert_stride;
      }
    }
    const CallContext call = rank.layer.forward(input, tensors.forward_output(), stream);
    rank.layer.backward(call, backward, tensors.backward_output(), stream);
    rank.layer.check(stream);
    return tensors.bits();
  };
  EXPECT_TRUE(step(shared, 0).equal(step(copies, matrix)));
}

TEST(CudaArguments, AGroupThatNeverHasATokenGetsZeroGradients) {
  const DeviceProblem tensors(make_problem(spec_with_tokens({1})));
  ForwardInput input = tensors.forward_input();
  ForwardOutput output = tensors.forward_output();
  BackwardInput backward_input = tensors.backward_input();
  BackwardOutput backward_output = tensors.backward_output();
  for (ConstTensorView* tensor :
       {&input.x, &input.expert_ids, &input.weights, &backward_input.x, &backward_input.dy}) {
    tensor->sizes[0] = 0;
  }
  for (TensorView* tensor : {&output.y, &backward_output.dx, &backward_output.dweights}) {
    tensor->sizes[0] = 0;
  }
  for (const MemoryMode mode : {MemoryMode::saved, MemoryMode::recompute}) {
    for (const Overlap overlap : {Overlap::on, Overlap::off}) {
      LayerConfig config = cuda_config(spec_with_tokens({1}));
      config.shape.max_tokens = config.row_capacity = 0;
      config.memory_mode = mode;
      config.overlap = overlap;
      OneRank rank(config);
      const TestStream stream;
      tensors.poison();
      const CallContext call = rank.layer.forward(input, output, stream);
      rank.layer.backward(call, backward_input, backward_output, stream);
      rank.layer.check(stream);
      const std::vector<bf16> zeros(tensors.E * tensors.I * tensors.H);
      EXPECT_TRUE(same_bits(tensors.dup.download(), zeros));
      EXPECT_TRUE(same_bits(tensors.ddown.download(), zeros));
    }
  }
}

// Contexts are reused, what they say about their call is not.
TEST(CudaContexts, KnowTheRowsOfTheirOwnCall) {
  const Problem large = make_problem(spec_with_tokens({24}));
  const Problem small = make_problem(spec_with_tokens({7}));
  OneRank rank(cuda_config(large.spec));
  const TestStream stream;
  for (const Problem* problem : {&large, &small, &large}) {
    const DeviceProblem tensors(*problem);
    const CallContext call =
        rank.layer.forward(tensors.forward_input(), tensors.forward_output(), stream);
    std::vector<std::int64_t> wanted(problem->spec.num_experts);
    for (const std::int32_t id : problem->expert_ids_TK) ++wanted.at(id);
    EXPECT_EQ(call.num_rows(), 2 * tensors.T);
    EXPECT_EQ(
        std::vector<std::int64_t>(call.rows_per_expert(), call.rows_per_expert() + wanted.size()),
        wanted);
    rank.layer.check(stream);
  }
}

/// A step that was captured once.
class CapturedStep {
 public:
  CapturedStep(OneRank& rank, const DeviceProblem& tensors, cudaStream_t stream) {
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
    call_ = rank.layer.forward(tensors.forward_input(), tensors.forward_output(), {stream});
    rank.layer.backward(call_, tensors.backward_input(), tensors.backward_output(), {stream});
    check(cudaStreamEndCapture(stream, &graph_), "capture");
    check(cudaGraphInstantiate(&executable_, graph_, 0), "instantiate");
  }
  CapturedStep(const CapturedStep&) = delete;
  CapturedStep& operator=(const CapturedStep&) = delete;
  ~CapturedStep() {
    cudaGraphExecDestroy(executable_);
    cudaGraphDestroy(graph_);
  }
  void replay(cudaStream_t stream) const { check(cudaGraphLaunch(executable_, stream), "replay"); }

 private:
  CallContext call_;
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t executable_ = nullptr;
};

TEST(CudaGraphs, OfSeveralTokenCountsReplayInAnyOrderBetweenEagerCalls) {
  std::vector<std::unique_ptr<DeviceProblem>> tensors;
  std::vector<Problem> problems;
  ProblemSpec largest = spec_with_tokens({200});
  for (const std::int64_t num_tokens : {200, 1, 77}) {
    ProblemSpec spec = largest;
    spec.tokens_per_rank = {num_tokens};
    spec.seed = static_cast<std::uint64_t>(num_tokens);
    problems.push_back(make_problem(spec));
    tensors.push_back(std::make_unique<DeviceProblem>(problems.back()));
  }
  OneRank rank(cuda_config(largest));
  const TestStream stream;
  const auto eager = [&](const DeviceProblem& problem) {
    const CallContext call =
        rank.layer.forward(problem.forward_input(), problem.forward_output(), stream);
    rank.layer.backward(call, problem.backward_input(), problem.backward_output(), stream);
  };
  std::vector<DeviceProblem::Bits> wanted;
  {
    // As many contexts as graphs will hold: a capture must not allocate.
    std::vector<CallContext> contexts;
    for (int i = 0; i < 4; ++i) {
      contexts.push_back(
          rank.layer.forward(tensors[0]->forward_input(), tensors[0]->forward_output(), stream));
    }
  }
  for (const auto& problem : tensors) {
    eager(*problem);
    rank.layer.check(stream);
    wanted.push_back(problem->bits());
  }
  // A capture shows that no call synchronises: it would fail.
  std::vector<std::unique_ptr<CapturedStep>> graphs;
  for (const auto& problem : tensors) {
    graphs.push_back(std::make_unique<CapturedStep>(rank, *problem, stream.get()));
  }
  for (const int i : {2, 0, 1, 1, -2, 0, 2, -1, 2, 2, 0, -3, 1}) {
    const int which = i < 0 ? -i - 1 : i;
    tensors[which]->poison();
    if (i < 0) {
      eager(*tensors[which]);
    } else {
      graphs[which]->replay(stream.get());
    }
    rank.layer.check(stream);
    EXPECT_TRUE(tensors[which]->bits().equal(wanted[which])) << "problem " << which;
  }
}

TEST(CudaGraphs, MayBeReplayedBetweenTheForwardAndTheBackwardCallOfAnother) {
  ProblemSpec spec = spec_with_tokens({120});
  const Problem captured_problem = make_problem(spec);
  spec.seed = 5;
  const Problem other_problem = make_problem(spec);
  const DeviceProblem captured(captured_problem), other(other_problem);
  OneRank rank(cuda_config(spec));
  const TestStream stream;
  const auto forward = [&](const DeviceProblem& tensors) {
    return rank.layer.forward(tensors.forward_input(), tensors.forward_output(), stream);
  };
  const auto backward = [&](const CallContext& call, const DeviceProblem& tensors) {
    rank.layer.backward(call, tensors.backward_input(), tensors.backward_output(), stream);
  };
  for (const DeviceProblem* tensors : {&captured, &other}) backward(forward(*tensors), *tensors);
  rank.layer.check(stream);
  const DeviceProblem::Bits wanted = other.bits(), wanted_of_graph = captured.bits();
  EXPECT_FALSE(rank.layer.is_in_graph());
  {
    // Its context is destroyed as soon as it is captured: by the graph it is kept.
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    check(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal), "capture");
    backward(forward(captured), captured);
    check(cudaStreamEndCapture(stream.get(), &graph), "capture");
    check(cudaGraphInstantiate(&executable, graph, 0), "instantiate");
    check(cudaGraphDestroy(graph), "cudaGraphDestroy");
    EXPECT_TRUE(rank.layer.is_in_graph());
    for (int repeat = 0; repeat < 3; ++repeat) {
      captured.poison();
      other.poison();
      const CallContext call = forward(other);
      check(cudaGraphLaunch(executable, stream.get()), "replay");
      backward(call, other);
      rank.layer.check(stream);
      EXPECT_TRUE(other.bits().equal(wanted));
      EXPECT_TRUE(captured.bits().equal(wanted_of_graph));
    }
    check(cudaGraphExecDestroy(executable), "cudaGraphExecDestroy");
  }
  // The driver tells of a graph's end from a thread of its own.
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (rank.layer.is_in_graph() && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_FALSE(rank.layer.is_in_graph());
}

TEST(CudaStreams, CallsOfTwoStreamsRunInTheOrderOfTheirEnqueuing) {
  const Problem problem = make_problem(spec_with_tokens({120}));
  const DeviceProblem first(problem), second(problem);
  OneRank rank(cuda_config(problem.spec));
  const TestStream stream, other;
  const auto step = [&](const DeviceProblem& tensors, const TestStream& forward_stream,
                        const TestStream& backward_stream) {
    const CallContext call =
        rank.layer.forward(tensors.forward_input(), tensors.forward_output(), forward_stream);
    rank.layer.backward(call, tensors.backward_input(), tensors.backward_output(), backward_stream);
  };
  step(first, stream, stream);
  rank.layer.check(stream);
  const DeviceProblem::Bits wanted = first.bits();
  for (int repeat = 0; repeat < 20; ++repeat) {
    first.poison();
    second.poison();
    step(first, stream, other);
    step(second, other, stream);
    rank.layer.check(stream);
    rank.layer.check(other);
    EXPECT_TRUE(first.bits().equal(wanted));
    EXPECT_TRUE(second.bits().equal(wanted));
  }
}

}  // namespace
}  // namespace megamoe::verify
