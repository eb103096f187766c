// fp32 weight gradients that begin beside dx: in a graph, two thousand times, and so small that
// sanitizers run them.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include "gpu/beside_dx.h"
#include "gpu/unchecked_calls.h"
#include "layer/workspace.h"

namespace megamoe::verify {
namespace {

using cuda::check;

/// A hang is to be reported with what was awaited.
RunOptions options_of_tests() {
  RunOptions options = options_beside_dx();
  options.deadline_s = 10.0;
  return options;
}

/// One rank's layer in a workspace full of NaN, and calls of it.
struct RankOfSteps {
  RankOfSteps(const Problem& problem, const RunOptions& options, Communicator& group)
      : workspace(layer_config(problem.spec, options), group),
        layer(layer_config(problem.spec, options), group, workspace),
        data(problem, options, group.rank()),
        calls(layer, data, group) {
    poison(workspace);
    group.barrier("poisoned", 60);
  }

  void step() { calls.backward(calls.forward()); }
  LayerTensors results() {
    layer.check(calls.stream());
    return calls.download();
  }

  Workspace workspace;
  MoeLayer layer;
  RankData data;
  UncheckedCalls calls;
};

/// What `num_steps` steps add up to where gradients follow dx.
LayerTensors one_after_the_other(const Problem& problem, RunOptions options, Communicator& group,
                                 int num_steps) {
  options.overlap = Overlap::off;
  RankOfSteps rank(problem, options, group);
  rank.calls.reset();
  for (int step = 0; step < num_steps; ++step) rank.step();
  return rank.results();
}

/// Ends with its scope.
class Graph {
 public:
  template <class Enqueue>
  Graph(cudaStream_t stream, const Enqueue& enqueue) {
    cudaGraph_t graph = nullptr;
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
    enqueue();
    check(cudaStreamEndCapture(stream, &graph), "capture");
    check(cudaGraphInstantiate(&executable_, graph, 0), "instantiate");
    check(cudaGraphDestroy(graph), "cudaGraphDestroy");
    check(cudaGraphUpload(executable_, stream), "upload of a graph");
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  ~Graph() { cudaGraphExecDestroy(executable_); }
  void replay(cudaStream_t stream) const { check(cudaGraphLaunch(executable_, stream), "replay"); }

 private:
  cudaGraphExec_t executable_ = nullptr;
};

/// Small, and without a peer to wait for: what a sanitizer has time for.
TEST(CudaBesideDx, OneRankHasTheBitsOfOneAfterTheOther) {
  const Problem problem = make_problem(spec_beside_dx(1, /*num_experts=*/2));
  run_ranks(1, [&](Communicator& threads) {
    const BackendGroup group(threads, {});
    const LayerTensors wanted = one_after_the_other(problem, options_beside_dx(), group.get(), 2);
    RankOfSteps rank(problem, options_beside_dx(), group.get());
    rank.calls.reset();
    for (int step = 0; step < 2; ++step) rank.step();
    EXPECT_EQ(differing_tensors(rank.results(), wanted), "");
  });
}

/// Replays of one captured step against as many eager calls.
void expect_replays_add_as_calls(int num_ranks) {
  constexpr int kNumSteps = 12;
  const Problem problem = make_problem(spec_beside_dx(num_ranks));
  run_ranks(num_ranks, [&](Communicator& threads) {
    const BackendGroup group(threads, {});
    const LayerTensors wanted =
        one_after_the_other(problem, options_of_tests(), group.get(), kNumSteps);
    RankOfSteps rank(problem, options_of_tests(), group.get());
    const cuda::CurrentDevice current(cuda_device_of(threads.rank(), threads.size()));
    rank.step();  // makes the context that the graph will hold
    rank.layer.check(rank.calls.stream());
    group.get().barrier("before the capture", 60);
    const Graph graph(rank.calls.cuda_stream(), [&] { rank.step(); });
    rank.calls.reset();
    rank.calls.synchronize();
    group.get().barrier("all have captured", 60);
    for (int step = 0; step < kNumSteps; ++step) graph.replay(rank.calls.cuda_stream());
    EXPECT_EQ(differing_tensors(rank.results(), wanted), "") << "rank " << threads.rank();
    group.get().barrier("all have replayed", 60);
  });
}

TEST(CudaBesideDx, ReplaysOfOneRankAddAsCallsDo) { expect_replays_add_as_calls(1); }

TEST(CudaBesideDx, ReplaysOfTwoRanksAddAsCallsDo) {
  if (num_cuda_devices() < 2) GTEST_SKIP() << "replays of ranks need a device each";
  expect_replays_add_as_calls(2);
}

TEST(CudaBesideDx, TwoThousandStepsGiveEqualBits) {
  const Problem problem = make_problem(spec_beside_dx(2));
  run_ranks(2, [&](Communicator& threads) {
    const BackendGroup group(threads, {});
    const LayerTensors wanted =
        one_after_the_other(problem, options_of_tests(), group.get(), /*num_steps=*/1);
    RankOfSteps rank(problem, options_of_tests(), group.get());
    for (int step = 0; step < 2000; ++step) {
      rank.calls.reset();
      rank.step();
      ASSERT_EQ(differing_tensors(rank.results(), wanted), "")
          << "step " << step << ", rank " << threads.rank();
    }
  });
}

}  // namespace
}  // namespace megamoe::verify
