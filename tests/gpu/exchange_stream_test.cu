// Calls in stream order without the host between them: back to back, and as graphs.
#include "gpu/exchange_world.cuh"

namespace megamoe::testing {
namespace {

constexpr std::int64_t kMaxTokens = 200;

WorkspaceDims stream_dims() { return exchange_dims(2, 16, 4, kMaxTokens, 128); }

TEST(ExchangeStream, ManyCallsWithoutSynchronisation) {
  MEGAMOE_SKIP_WITHOUT_DEVICE();
  const WorkspaceDims dims = stream_dims();
  ExchangeWorld world(dims);
  CaseMaker cases(dims, 11);
  const std::vector<RankInput> inputs = {cases.rank_input(kMaxTokens, Pattern::uniform),
                                         cases.rank_input(3, Pattern::holes)};
  world.prepare(cases, inputs);
  world.gpu().synchronize();
  constexpr int kCalls = 300;
  for (int call = 0; call < kCalls; ++call) {
    const Pull how = call % 2 == 0 ? Pull::through_registers : Pull::in_bulk;
    for (int r = 0; r < 2; ++r) {
      world.gpu().rank(r).enqueue_forward(how);
      if (call % 3 == 0) world.gpu().rank(r).enqueue_backward(how);
    }
  }
  world.gpu().synchronize();
  world.poison();
  world.gpu().forward(Pull::through_registers);
  world.host().forward(inputs, world.results());
  world.compare_all(ExchangeWorld::Direction::forward);
}

TEST(ExchangeStream, FailedCallsBetweenGoodOnes) {
  MEGAMOE_SKIP_WITHOUT_DEVICE();
  const WorkspaceDims dims = stream_dims();
  ExchangeWorld world(dims);
  CaseMaker cases(dims, 12);
  const std::vector<RankInput> inputs = {cases.rank_input(kMaxTokens, Pattern::uniform),
                                         cases.rank_input(kMaxTokens, Pattern::uniform)};
  world.prepare(cases, inputs);
  DeviceBuffer<std::int32_t> bad_ids(kMaxTokens * id_stride(dims));
  bad_ids.upload(std::vector<std::int32_t>(bad_ids.size(), -7));
  world.gpu().synchronize();
  for (int call = 0; call < 200; ++call) {
    for (int r = 0; r < 2; ++r) {
      GpuRank& rank = world.gpu().rank(r);
      // Rank 0 fails, so that rank 1 runs on as soon as it has read why.
      gpu::RoutingInput input = rank.routing_input();
      if (r == 0) input.ids = bad_ids.data();
      for (int repeat = 0; repeat < 3; ++repeat) {
        gpu::count_slots(rank.view, rank.plan.data(), input, rank.num_tokens, rank.stream);
        gpu::enter_call(rank.view, rank.plan.data(), gpu::CallKind::forward, kForwardCall,
                        rank.num_tokens, rank.stream);
      }
      rank.enqueue_forward(Pull::through_registers);
    }
  }
  world.gpu().synchronize();
  for (int r = 0; r < 2; ++r) {
    EXPECT_EQ(world.gpu().rank(r).view.failure->code, device::FailureCode::expert_id_out_of_range);
    world.gpu().rank(r).view.failure->is_set = 0;
  }
  world.poison();
  world.gpu().forward(Pull::through_registers);
  world.host().forward(inputs, world.results());
  world.compare_all(ExchangeWorld::Direction::forward);
}

/// One graph a rank of a forward call with its num_tokens.
class ForwardGraphs {
 public:
  explicit ForwardGraphs(GpuRanks& ranks) : ranks_(ranks) {
    for (int r = 0; r < ranks.num_ranks(); ++r) {
      GpuRank& rank = ranks.rank(r);
      cudaGraph_t graph = nullptr;
      check_cuda(cudaStreamBeginCapture(rank.stream, cudaStreamCaptureModeThreadLocal), "capture");
      rank.enqueue_forward(Pull::through_registers);
      check_cuda(cudaStreamEndCapture(rank.stream, &graph), "end of capture");
      cudaGraphExec_t exec = nullptr;
      check_cuda(cudaGraphInstantiate(&exec, graph, 0), "instantiate");
      check_cuda(cudaGraphUpload(exec, rank.stream), "upload of a graph");
      check_cuda(cudaGraphDestroy(graph), "destroy");
      execs_.push_back(exec);
    }
    ranks.synchronize();
  }
  ForwardGraphs(const ForwardGraphs&) = delete;
  ForwardGraphs& operator=(const ForwardGraphs&) = delete;
  ~ForwardGraphs() {
    for (cudaGraphExec_t exec : execs_) cudaGraphExecDestroy(exec);
  }
  void launch() {
    ranks_.synchronize();
    for (int r = 0; r < ranks_.num_ranks(); ++r) {
      check_cuda(cudaGraphLaunch(execs_[r], ranks_.rank(r).stream), "graph launch");
    }
    ranks_.synchronize();
  }

 private:
  GpuRanks& ranks_;
  std::vector<cudaGraphExec_t> execs_;
};

TEST(ExchangeStream, GraphsOfSeveralSizesAndEagerCallsMix) {
  MEGAMOE_SKIP_WITHOUT_DEVICE();
  const WorkspaceDims dims = stream_dims();
  ExchangeWorld world(dims);
  CaseMaker cases(dims, 13);
  std::vector<RankInput> inputs = {cases.rank_input(kMaxTokens, Pattern::uniform),
                                   cases.rank_input(kMaxTokens, Pattern::holes)};
  world.prepare(cases, inputs);
  const auto set_tokens = [&](std::int64_t num_tokens) {
    for (int r = 0; r < 2; ++r) {
      world.gpu().rank(r).num_tokens = num_tokens;
      inputs[r].num_tokens = num_tokens;
    }
  };
  std::vector<std::unique_ptr<ForwardGraphs>> graphs;
  const std::vector<std::int64_t> sizes = {kMaxTokens, 7, 65};
  for (const std::int64_t size : sizes) {
    set_tokens(size);
    graphs.push_back(std::make_unique<ForwardGraphs>(world.gpu()));
  }
  std::mt19937 random(5);
  for (int call = 0; call < 40 && !::testing::Test::HasFailure(); ++call) {
    const std::size_t which = random() % sizes.size();
    SCOPED_TRACE("call " + std::to_string(call) + ", tokens " + std::to_string(sizes[which]));
    set_tokens(sizes[which]);
    world.poison();
    if (random() % 3 == 0) {
      world.gpu().forward(Pull::in_bulk);
    } else {
      graphs[which]->launch();
    }
    world.host().forward(inputs, world.results());
    world.compare_all(ExchangeWorld::Direction::forward);
  }
}

}  // namespace
}  // namespace megamoe::testing
