// What only the CUDA backend has to show: device memory, streams, graphs, heaps, sizes that need a
// device's memory. Legend: R ranks, T tokens, H hidden, I intermediate, E experts, K slots.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <thread>

#include "cuda/runtime.h"
#include "layer_fixture.h"
#include "megamoe/cuda.h"

namespace megamoe::verify {
namespace {

using cuda::check;
using cuda::DeviceMemory;

/// A device tensor whose contents are given.
template <class T>
class OnDevice {
 public:
  explicit OnDevice(const std::vector<T>& values)
      : OnDevice(static_cast<std::int64_t>(values.size())) {
    check(cudaMemcpy(memory_.data(), values.data(), values.size() * sizeof(T),
                     cudaMemcpyHostToDevice),
          "upload");
  }
  /// Every byte 0xff: NaN.
  explicit OnDevice(std::int64_t count)
      : count_(count), memory_(0, count * static_cast<std::int64_t>(sizeof(T)), "a test's tensor") {
    check(cudaMemset(memory_.data(), 0xff, count * sizeof(T)), "poison");
    check(cudaDeviceSynchronize(), "poison");
  }
  [[nodiscard]] TensorView view(std::initializer_list<std::int64_t> sizes) const {
    return tensor_view(reinterpret_cast<T*>(memory_.data()), sizes);
  }
  [[nodiscard]] T* data() const { return reinterpret_cast<T*>(memory_.data()); }
  [[nodiscard]] std::vector<T> download() const { return download(0, count_); }
  [[nodiscard]] std::vector<T> download(std::int64_t first, std::int64_t count) const {
    std::vector<T> values(count);
    check(cudaMemcpy(values.data(), data() + first, values.size() * sizeof(T),
                     cudaMemcpyDeviceToHost),
          "download");
    return values;
  }

 private:
  std::int64_t count_;
  DeviceMemory memory_;
};

bool same_bits(const std::vector<bf16>& left, const std::vector<bf16>& right) {
  return left.size() == right.size() &&
         std::memcmp(left.data(), right.data(), left.size() * sizeof(bf16)) == 0;
}

class TestStream {
 public:
  TestStream() { check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "a stream"); }
  TestStream(const TestStream&) = delete;
  TestStream& operator=(const TestStream&) = delete;
  ~TestStream() { cudaStreamDestroy(stream_); }
  [[nodiscard]] cudaStream_t get() const { return stream_; }
  operator Stream() const { return {stream_}; }  // NOLINT(google-explicit-constructor)

 private:
  cudaStream_t stream_ = nullptr;
};

/// One rank's tensors of a problem on device 0.
struct DeviceProblem {
  explicit DeviceProblem(const Problem& problem)
      : T(problem.spec.num_tokens()),
        H(problem.spec.hidden_dim),
        I(problem.spec.intermediate_dim),
        E(problem.spec.num_experts),
        K(problem.spec.top_k),
        x(problem.x_TH),
        dy(problem.dy_TH),
        y(T * H),
        dx(T * H),
        gate(problem.gate_EIH),
        up(problem.up_EIH),
        down(problem.down_EHI),
        dgate(E * I * H),
        dup(E * I * H),
        ddown(E * I * H),
        ids(problem.expert_ids_TK),
        weights(problem.weights_TK),
        dweights(T * K) {}

  [[nodiscard]] ExpertWeights experts() const {
    return {gate.view({E, I, H}), up.view({E, I, H}), down.view({E, H, I})};
  }
  [[nodiscard]] ForwardInput forward_input() const {
    return {x.view({T, H}), ids.view({T, K}), weights.view({T, K}), experts()};
  }
  [[nodiscard]] ForwardOutput forward_output() const { return {y.view({T, H})}; }
  [[nodiscard]] BackwardInput backward_input() const {
    return {x.view({T, H}), dy.view({T, H}), experts()};
  }
  [[nodiscard]] BackwardOutput backward_output() const {
    return {dx.view({T, H}),
            dweights.view({T, K}),
            {dgate.view({E, I, H}), dup.view({E, I, H}), ddown.view({E, H, I})}};
  }

  struct Bits {
    std::vector<bf16> y, dx, dgate, dup, ddown;
    std::vector<float> dweights;
    [[nodiscard]] bool equal(const Bits& other) const {
      return same_bits(y, other.y) && same_bits(dx, other.dx) && same_bits(dgate, other.dgate) &&
             same_bits(dup, other.dup) && same_bits(ddown, other.ddown) &&
             std::memcmp(dweights.data(), other.dweights.data(), dweights.size() * 4) == 0;
    }
  };
  [[nodiscard]] Bits bits() const {
    return {y.download(),   dx.download(),    dgate.download(),
            dup.download(), ddown.download(), dweights.download()};
  }
  void poison() const {
    check(cudaMemset(y.data(), 0xff, T * H * 2), "poison");
    check(cudaMemset(dx.data(), 0xff, T * H * 2), "poison");
    check(cudaMemset(dweights.data(), 0xff, T * K * 4), "poison");
    for (const auto* tensor : {&dgate, &dup, &ddown}) {
      check(cudaMemset(tensor->data(), 0xff, E * I * H * 2), "poison");
    }
    check(cudaDeviceSynchronize(), "poison");
  }

  std::int64_t T, H, I, E, K;
  OnDevice<bf16> x, dy, y, dx, gate, up, down, dgate, dup, ddown;
  OnDevice<std::int32_t> ids;
  OnDevice<float> weights, dweights;
};

/// A layer of one rank on device 0.
struct OneRank {
  explicit OneRank(const LayerConfig& config)
      : threads(make_thread_communicators(1)),
        group(make_cuda_communicator(*threads[0], 0)),
        workspace(config, *group),
        layer(config, *group, workspace) {}
  std::vector<std::unique_ptr<Communicator>> threads;
  std::unique_ptr<Communicator> group;
  Workspace workspace;
  MoeLayer layer;
};

LayerConfig cuda_config(const ProblemSpec& spec) {
  RunOptions options;
  options.backend = Backend::cuda;
  return layer_config(spec, options);
}

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
  expect_refusal({"x lies in host memory"}, [&](ForwardInput& input, ForwardOutput&) {
    input.x.data = problem.x_TH.data();
  });
  expect_refusal({"expert_ids lies in host memory"}, [&](ForwardInput& input, ForwardOutput&) {
    input.expert_ids.data = problem.expert_ids_TK.data();
  });
  expect_refusal({"x", "16 bytes"}, [&](ForwardInput& input, ForwardOutput&) {
    input.x.data = tensors.x.data() + 1;
  });
  expect_refusal({"y", "multiple of 16 bytes"}, [&](ForwardInput&, ForwardOutput& output) {
    output.y.strides[0] += 1;
  });
  expect_refusal({"experts.down", "16 bytes"}, [&](ForwardInput& input, ForwardOutput&) {
    input.experts.down.data = tensors.down.data() + 4;
  });
  // Still usable.
  const CallContext call =
      rank.layer.forward(tensors.forward_input(), tensors.forward_output(), stream);
  rank.layer.check(stream);
  EXPECT_EQ(call.num_rows(), 48);
}

TEST(CudaArguments, AHostCommunicatorOrAMissingDeviceIsRefused) {
  const auto threads = make_thread_communicators(1);
  const LayerConfig config = cuda_config(spec_with_tokens({24}));
  expect_error(ErrorCode::invalid_argument, {"make_cuda_communicator"},
               [&] { const Workspace workspace(config, *threads[0]); });
  expect_error(ErrorCode::invalid_argument, {"device is 99"},
               [&] { make_cuda_communicator(*threads[0], 99); });
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
      contexts.push_back(rank.layer.forward(tensors[0]->forward_input(),
                                            tensors[0]->forward_output(), stream));
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

TEST(CudaStreams, CallsOfTwoStreamsRunInTheOrderOfTheirEnqueuing) {
  const Problem problem = make_problem(spec_with_tokens({120}));
  const DeviceProblem first(problem), second(problem);
  OneRank rank(cuda_config(problem.spec));
  const TestStream stream, other;
  const auto step = [&](const DeviceProblem& tensors, const TestStream& forward_stream,
                        const TestStream& backward_stream) {
    const CallContext call =
        rank.layer.forward(tensors.forward_input(), tensors.forward_output(), forward_stream);
    rank.layer.backward(call, tensors.backward_input(), tensors.backward_output(),
                        backward_stream);
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

TEST(CudaHeaps, ComeAndGoWithoutALeak) {
  const Problem problem = make_problem(spec_with_tokens({24}));
  const LayerConfig config = cuda_config(problem.spec);
  const auto free_bytes = [] {
    std::size_t free = 0, total = 0;
    check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    return free;
  };
  std::size_t before = 0;
  for (int i = 0; i < 10; ++i) {
    const auto threads = make_thread_communicators(1);
    const auto group = make_cuda_communicator(*threads[0], 0);
    for (int heap = 0; heap < 20; ++heap) {
      Workspace workspace(config, *group);
      const MoeLayer layer(config, *group, workspace);
    }
    if (i == 0) before = free_bytes();
  }
  EXPECT_EQ(free_bytes(), before);
}

TEST(CudaHeaps, OfTwoRanksComeAndGoWithoutALeak) {
  if (num_cuda_devices() < 2) GTEST_SKIP() << "needs two devices";
  const LayerConfig config = cuda_config(spec_with_tokens({24, 24}));
  const auto free_bytes = [] {
    std::size_t free = 0, total = 0;
    check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    return static_cast<double>(free);
  };
  double before = 0.0;
  for (int i = 0; i < 10; ++i) {
    run_ranks(2, [&](Communicator& threads) {
      const auto group = make_cuda_communicator(threads, threads.rank());
      for (int heap = 0; heap < (i == 0 ? 200 : 5); ++heap) {
        Workspace workspace(config, *group);
        const MoeLayer layer(config, *group, workspace);
        if (i == 0 && heap == 5 && threads.rank() == 0) before = free_bytes();
      }
      // NCCL keeps a little for itself; 195 heaps of 4 MB would be 780 MB.
      if (i == 0 && threads.rank() == 0) {
        EXPECT_NEAR(free_bytes(), before, 64e6);
      }
      group->barrier("both ranks have looked", 60);
    });
    if (i == 1) before = free_bytes();
  }
  EXPECT_NEAR(free_bytes(), before, 64e6);
}

/// The part of one process in the tests below; not a test of its own.
TEST(CudaProcessRank, DISABLED_Run) {
  const char* rank_text = std::getenv("MEGAMOE_TEST_RANK");
  ASSERT_NE(rank_text, nullptr);
  const int rank = std::atoi(rank_text);
  const auto group =
      make_process_communicator(std::getenv("MEGAMOE_TEST_GROUP"), rank, 2, /*deadline_s=*/60);
  const Problem problem = make_problem(spec_with_tokens({40, 21}));
  RankSession session(problem, {}, *group);
  const char* killed = std::getenv("MEGAMOE_TEST_KILLED");
  for (int step = 0; step < 3; ++step) {
    const CallContext context = session.forward();
    if (killed != nullptr && step == 1) {
      if (rank == 1) raise(SIGKILL);
      const auto start = std::chrono::steady_clock::now();
      expect_error(ErrorCode::peer_failed, {"rank 1", "without a word"},
                   [&] { session.backward(context); });
      const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
      EXPECT_LT(taken.count(), 20.0);  // the deadlines are 60 s
      std::fflush(nullptr);
      _exit(testing::Test::HasFailure() ? 1 : 0);  // what is shared with a dead peer is not taken apart
    }
    session.backward(context);
  }
  std::ofstream file(std::getenv("MEGAMOE_TEST_OUTPUT"), std::ios::binary);
  for (const RawTensor* tensor : {&session.tensors().y, &session.tensors().dx, &session.tensors().dup}) {
    file.write(reinterpret_cast<const char*>(tensor->bytes.data()),
               static_cast<std::streamsize>(tensor->bytes.size()));
  }
  group->barrier("both processes are done", 60);
}

std::string output_of(const std::string& group, int rank) {
  return "/tmp/" + group + "." + std::to_string(rank);
}

/// Starts the test above in two processes.
std::vector<pid_t> spawn_two_ranks(const std::string& group) {
  std::vector<pid_t> processes;
  for (int rank = 0; rank < 2; ++rank) {
    setenv("MEGAMOE_TEST_RANK", std::to_string(rank).c_str(), 1);
    setenv("MEGAMOE_TEST_GROUP", group.c_str(), 1);
    setenv("MEGAMOE_TEST_OUTPUT", output_of(group, rank).c_str(), 1);
    const char* arguments[] = {"layer_gpu_test", "--gtest_filter=CudaProcessRank.*",
                               "--gtest_also_run_disabled_tests", "--gtest_brief=1", nullptr};
    pid_t process = 0;
    EXPECT_EQ(posix_spawn(&process, "/proc/self/exe", nullptr, nullptr,
                          const_cast<char* const*>(arguments), environ),
              0);
    processes.push_back(process);
  }
  return processes;
}

TEST(CudaProcesses, AKilledPeerIsNamedLongBeforeTheDeadline) {
  if (num_cuda_devices() < 2) GTEST_SKIP() << "needs two devices";
  setenv("MEGAMOE_TEST_KILLED", "1", 1);
  const std::vector<pid_t> processes =
      spawn_two_ranks("killed_test." + std::to_string(getpid()));
  unsetenv("MEGAMOE_TEST_KILLED");
  int status = -1;
  waitpid(processes[0], &status, 0);
  EXPECT_EQ(status, 0);
  waitpid(processes[1], &status, 0);
  EXPECT_TRUE(WIFSIGNALED(status));
}

TEST(CudaProcesses, OneADeviceGiveTheBitsOfThreads) {
  if (num_cuda_devices() < 2) GTEST_SKIP() << "needs two devices";
  const Problem problem = make_problem(spec_with_tokens({40, 21}));
  std::vector<LayerTensors> wanted(2);
  run_sessions(problem, {}, [&](RankSession& session, Communicator& group) {
    const CallContext context = session.forward();
    session.backward(context);
    wanted[group.rank()] = session.tensors();
  });
  const std::string name = "layer_test." + std::to_string(getpid());
  const std::vector<pid_t> processes = spawn_two_ranks(name);
  for (int rank = 0; rank < 2; ++rank) {
    int status = -1;
    waitpid(processes[rank], &status, 0);
    EXPECT_EQ(status, 0) << "rank " << rank;
    const std::string output = output_of(name, rank);
    std::ifstream file(output, std::ios::binary);
    for (const RawTensor* tensor : {&wanted[rank].y, &wanted[rank].dx, &wanted[rank].dup}) {
      std::vector<std::byte> bytes(tensor->bytes.size());
      file.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
      EXPECT_TRUE(bytes == tensor->bytes) << "rank " << rank;
    }
    std::filesystem::remove(output);
  }
}

TEST(CudaWorkspaceBytes, AreWhatIsAllocated) {
  ProblemSpec spec = spec_with_tokens({4096});
  spec.hidden_dim = spec.intermediate_dim = 1024;
  const LayerConfig config = cuda_config(spec);
  { const OneRank warm_up(config); }
  std::size_t before = 0, after = 0, total = 0;
  check(cudaMemGetInfo(&before, &total), "cudaMemGetInfo");
  const OneRank rank(config);
  check(cudaMemGetInfo(&after, &total), "cudaMemGetInfo");
  const auto stated = static_cast<double>(workspace_bytes(config, 1).total());
  EXPECT_EQ(rank.workspace.bytes().total(), workspace_bytes(config, 1).total());
  // The device hands memory out in pages of 2 MiB.
  EXPECT_NEAR(static_cast<double>(before - after), stated, 3.0 * (2 << 20));
}

TEST(CudaFailures, AMissedDeadlineNamesThePeerAndStays) {
  const Problem problem = make_problem(spec_with_tokens({12, 12}));
  RunOptions options;
  options.deadline_s = 1.0;
  run_sessions(problem, options, [&](RankSession& session, Communicator& group) {
    const CallContext context = session.forward();
    group.barrier("both have run", 60);
    if (group.rank() == 0) {
      const auto start = std::chrono::steady_clock::now();
      expect_error(ErrorCode::deadline_exceeded, {"rank 0 waited", "rank 1", "the entry"},
                   [&] { session.backward(context); });
      const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
      EXPECT_LT(taken.count(), 10.0);
      expect_error(ErrorCode::deadline_exceeded, {"rank 1"}, [&] { session.forward(); });
    }
    group.barrier("the deadline has passed", 60);
    if (group.rank() == 1) {
      expect_error(ErrorCode::peer_failed, {"rank 0"}, [&] { session.backward(context); });
    }
  });
}

TEST(CudaFailures, APeerThatRaisesBetweenCallsIsNamedLongBeforeTheDeadline) {
  const Problem problem = make_problem(spec_with_tokens({12, 12}));
  const auto start = std::chrono::steady_clock::now();
  std::optional<Error> of_survivor;
  const auto run = [&] {
    run_ranks(2, [&](Communicator& group) {
      RankSession session(problem, {}, group);
      const CallContext context = session.forward();
      if (group.rank() == 1) throw Error(ErrorCode::internal, "the disk is full");
      of_survivor = error_of([&] { session.backward(context); });
    });
  };
  expect_error(ErrorCode::internal, {"the disk is full"}, run);
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
  EXPECT_LT(taken.count(), 20.0);  // the deadlines are 60 s
  ASSERT_TRUE(of_survivor);
  EXPECT_EQ(of_survivor->code(), ErrorCode::peer_failed);
  EXPECT_NE(std::string(of_survivor->what()).find("rank 1"), std::string::npos);
  EXPECT_NE(std::string(of_survivor->what()).find("the disk is full"), std::string::npos);
}

TEST(CudaFailures, OneRanksRefusalFailsTheCallOnAll) {
  const Problem problem = make_problem(spec_with_tokens({12, 12}));
  const LayerTensors clean = run_layer(problem, {});
  const LayerTensors after =
      run_sessions(problem, {}, [&](RankSession& session, Communicator& group) {
        for (int repeat = 0; repeat < 3; ++repeat) {
          if (group.rank() == 0) {
            expect_error(ErrorCode::invalid_argument, {"context is not of a forward call"},
                         [&] { session.backward(CallContext()); });
          } else {
            expect_error(ErrorCode::invalid_argument, {"rank 0 refused"},
                         [&] { session.forward(); });
          }
        }
        const CallContext context = session.forward();
        session.backward(context);
      });
  EXPECT_EQ(differing_tensors(after, clean), "");
}

TEST(CudaFailures, AFailureStaysUntilItIsChecked) {
  Problem problem = make_problem(spec_with_tokens({24}));
  const DeviceProblem good(problem);
  problem.expert_ids_TK[5] = 99;
  const DeviceProblem bad(problem);
  OneRank rank(cuda_config(problem.spec));
  const TestStream stream;
  const CallContext call = rank.layer.forward(bad.forward_input(), bad.forward_output(), stream);
  check(cudaStreamSynchronize(stream.get()), "a failing call");
  for (int repeat = 0; repeat < 2; ++repeat) {
    expect_error(ErrorCode::expert_id_out_of_range, {"expert_ids[2, 1] is 99", "0 to 7"}, [&] {
      rank.layer.forward(good.forward_input(), good.forward_output(), stream);
    });
  }
  expect_error(ErrorCode::expert_id_out_of_range, {"99"}, [&] { rank.layer.check(stream); });
  EXPECT_TRUE(same_bits(bad.y.download(), std::vector<bf16>(24 * 64, bf16{0xffff})));
  rank.layer.forward(good.forward_input(), good.forward_output(), stream);
  rank.layer.check(stream);
  // The weight gradients of a failed call stay as they were.
  rank.layer.backward(call, bad.backward_input(), bad.backward_output(), stream);
  expect_error(ErrorCode::invalid_argument, {"forward call", "failed"},
               [&] { rank.layer.check(stream); });
  EXPECT_TRUE(same_bits(bad.dup.download(), std::vector<bf16>(8 * 64 * 64, bf16{0xffff})));
}

/// T tokens that repeat the first 64, so that rows of the large call must have the bits of the small
/// one.
TEST(CudaCase11ManyRows, OffsetsPassTwoToThe31Elements) {
  constexpr std::int64_t kTokens = 40000, kHidden = 7168, kSmall = 64;
  std::size_t free = 0, total = 0;
  check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  if (free < std::size_t{60} << 30) GTEST_SKIP() << "needs 60 GB of device memory";
  ProblemSpec spec = spec_with_tokens({kSmall});
  spec.hidden_dim = kHidden;
  spec.top_k = 8;
  const Problem small = make_problem(spec);
  Problem large = small;
  large.spec.tokens_per_rank = {kTokens};
  const auto repeat = [&](auto& values, std::int64_t width) {
    values.resize(kTokens * width);
    for (std::int64_t t = kSmall; t < kTokens; ++t) {
      std::copy_n(&values[t % kSmall * width], width, &values[t * width]);
    }
  };
  repeat(large.x_TH, kHidden);
  repeat(large.dy_TH, kHidden);
  repeat(large.expert_ids_TK, spec.top_k);
  repeat(large.weights_TK, spec.top_k);
  const TestStream stream;
  const auto run = [&](const Problem& problem, const DeviceProblem& tensors) {
    OneRank rank(cuda_config(problem.spec));
    const CallContext call =
        rank.layer.forward(tensors.forward_input(), tensors.forward_output(), stream);
    rank.layer.backward(call, tensors.backward_input(), tensors.backward_output(), stream);
    rank.layer.check(stream);
  };
  const DeviceProblem of_small(small), of_large(large);
  run(small, of_small);
  run(large, of_large);
  const std::vector<bf16> y = of_small.y.download(), dx = of_small.dx.download();
  for (const std::int64_t first : {std::int64_t{0}, std::int64_t{19968}, kTokens - kSmall}) {
    EXPECT_TRUE(same_bits(of_large.y.download(first * kHidden, kSmall * kHidden), y)) << first;
    EXPECT_TRUE(same_bits(of_large.dx.download(first * kHidden, kSmall * kHidden), dx)) << first;
  }
}

/// Weights of E experts in guarded buffers; tokens go to the last expert alone. Its results must have
/// the bits of a layer of that one expert.
TEST(CudaCase12HugeExpertWeights, TheLastExpertLiesBeyondTwoToThe31Elements) {
  constexpr std::int64_t kExperts = 512, kHidden = 5120, kIntermediate = 2048, kTokens = 40;
  std::size_t free = 0, total = 0;
  check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  if (free < std::size_t{80} << 30) GTEST_SKIP() << "needs 80 GB of device memory";
  ProblemSpec spec = spec_with_tokens({kTokens});
  spec.hidden_dim = kHidden;
  spec.intermediate_dim = kIntermediate;
  spec.num_experts = 1;
  spec.top_k = 1;
  const Problem one = make_problem(spec);
  const TestStream stream;
  const DeviceProblem alone(one);
  {
    OneRank rank(cuda_config(spec));
    const CallContext call =
        rank.layer.forward(alone.forward_input(), alone.forward_output(), stream);
    rank.layer.backward(call, alone.backward_input(), alone.backward_output(), stream);
    rank.layer.check(stream);
  }
  constexpr std::int64_t kExpertSize = kHidden * kIntermediate;
  constexpr std::int64_t kLast = (kExperts - 1) * kExpertSize;
  constexpr std::int64_t kGuard = 4096;
  const auto place_last = [&](const OnDevice<bf16>& all, const OnDevice<bf16>& last) {
    check(cudaMemcpy(all.data() + kLast, last.data(), kExpertSize * 2, cudaMemcpyDeviceToDevice),
          "placing an expert");
  };
  const OnDevice<bf16> gate(kExperts * kExpertSize), up(kExperts * kExpertSize),
      down(kExperts * kExpertSize);
  place_last(gate, alone.gate);
  place_last(up, alone.up);
  place_last(down, alone.down);
  const OnDevice<bf16> dgate(kExperts * kExpertSize + kGuard), dup(kExperts * kExpertSize + kGuard),
      ddown(kExperts * kExpertSize + kGuard);
  Problem moved = one;
  moved.spec.num_experts = kExperts;
  std::fill(moved.expert_ids_TK.begin(), moved.expert_ids_TK.end(), kExperts - 1);
  const OnDevice<std::int32_t> ids(moved.expert_ids_TK);
  const OnDevice<bf16> y(kTokens * kHidden), dx(kTokens * kHidden);
  const OnDevice<float> dweights(kTokens);
  const auto view = [&](const OnDevice<bf16>& tensor, std::int64_t rows, std::int64_t columns) {
    return tensor.view({kExperts, rows, columns});
  };
  const ExpertWeights experts{view(gate, kIntermediate, kHidden), view(up, kIntermediate, kHidden),
                              view(down, kHidden, kIntermediate)};
  OneRank rank(cuda_config(moved.spec));
  const CallContext call =
      rank.layer.forward({alone.x.view({kTokens, kHidden}), ids.view({kTokens, 1}),
                          alone.weights.view({kTokens, 1}), experts},
                         {y.view({kTokens, kHidden})}, stream);
  rank.layer.backward(
      call, {alone.x.view({kTokens, kHidden}), alone.dy.view({kTokens, kHidden}), experts},
      {dx.view({kTokens, kHidden}),
       dweights.view({kTokens, 1}),
       {view(dgate, kIntermediate, kHidden), view(dup, kIntermediate, kHidden),
        view(ddown, kHidden, kIntermediate)}},
      stream);
  rank.layer.check(stream);
  EXPECT_TRUE(same_bits(y.download(), alone.y.download()));
  EXPECT_TRUE(same_bits(dx.download(), alone.dx.download()));
  const std::pair<const OnDevice<bf16>*, const OnDevice<bf16>*> gradients[] = {
      {&dgate, &alone.dgate}, {&dup, &alone.dup}, {&ddown, &alone.ddown}};
  for (const auto& [all, last] : gradients) {
    EXPECT_TRUE(same_bits(all->download(kLast, kExpertSize), last->download()));
    EXPECT_TRUE(same_bits(all->download(kLast - kExpertSize, kExpertSize),
                          std::vector<bf16>(kExpertSize)));  // an expert without rows: zeros
    EXPECT_TRUE(same_bits(all->download(kExperts * kExpertSize, kGuard),
                          std::vector<bf16>(kGuard, bf16{0xffff})));
  }
}

}  // namespace
}  // namespace megamoe::verify
