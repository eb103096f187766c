// Products under which rows travel leave the same bits everywhere as the chain of kernels that
// first pulls, then multiplies, then pushes.
#include <random>

#include "gpu/exchange_world.cuh"
#include "gpu/overlap_world.cuh"

namespace megamoe::testing {
namespace {

using products::Sharing;

WorkspaceDims layer_dims(int num_ranks, int num_experts, int top_k, std::int64_t max_tokens,
                         std::int64_t hidden, std::int64_t intermediate) {
  WorkspaceDims dims = exchange_dims(num_ranks, num_experts, top_k, max_tokens, hidden);
  dims.intermediate_dim = intermediate;
  return dims;
}

void expect_same_bits(const std::vector<unsigned long long>& expected,
                      const std::vector<unsigned long long>& actual) {
  ASSERT_EQ(expected.size(), actual.size());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const int hash = static_cast<int>(i) % LayerRank::kNumHashes;
    EXPECT_EQ(expected[i], actual[i])
        << LayerRank::name_of_hash(hash) << " of rank " << i / LayerRank::kNumHashes;
  }
}

/// One forward and one backward call both ways.
void run_and_compare(LayerRanks& layers, const std::vector<RankInput>& inputs) {
  std::vector<unsigned long long> forward[2];
  std::vector<unsigned long long> backward[2];
  for (const Overlap overlap : {Overlap::off, Overlap::on}) {
    const int way = static_cast<int>(overlap);
    layers.poison();
    layers.upload(inputs);
    layers.forward(overlap);
    forward[way] = layers.bits();
    layers.poison();
    layers.backward(overlap);
    backward[way] = layers.bits();
  }
  EXPECT_FALSE(layers.failed());
  {
    SCOPED_TRACE("forward");
    expect_same_bits(forward[0], forward[1]);
  }
  SCOPED_TRACE("backward");
  expect_same_bits(backward[0], backward[1]);
}

struct Group {
  int num_ranks;
  int num_experts;
  int top_k;
  std::int64_t hidden;
  std::int64_t intermediate;
  int num_calls;
};

class RandomCalls : public ::testing::TestWithParam<Group> {};

TEST_P(RandomCalls, LeaveTheSameBitsAsTheChain) {
  MEGAMOE_SKIP_WITHOUT_DEVICE();
  const Group& group = GetParam();
  const WorkspaceDims dims = layer_dims(group.num_ranks, group.num_experts, group.top_k, 257,
                                        group.hidden, group.intermediate);
  LayerRanks layers(dims);
  CaseMaker cases(dims, 4000 + group.num_experts);
  constexpr Sharing kSharings[] = {Sharing::rows, Sharing::channels, Sharing::automatic};
  const int most_sms = layers.options.num_sms;
  for (int call = 0; call < group.num_calls && !HasFailure(); ++call) {
    const Pattern pattern = cases.any_pattern();
    SCOPED_TRACE("call " + std::to_string(call) + ", pattern " +
                 std::to_string(static_cast<int>(pattern)));
    layers.options.sharing = kSharings[call % 3];
    layers.options.num_sms = call % 5 == 0 ? 2 : most_sms;
    // SwiGLU, the one with variants for each way of sharing, in every second call.
    const auto kind = static_cast<ActivationKind>(call % 4 < 2 ? 0 : call / 4 % 6);
    layers.set(call % 2 == 0 ? Memory::saved : Memory::recompute, {kind});
    run_and_compare(layers, cases.group_input(pattern));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Groups, RandomCalls,
    ::testing::Values(Group{1, 8, 2, 192, 64, 60}, Group{1, 64, 8, 320, 192, 60},
                      Group{2, 8, 3, 64, 128, 60}, Group{2, 128, 8, 576, 192, 60},
                      Group{2, 60, 4, 128, 320, 60}, Group{3, 12, 4, 256, 128, 60},
                      Group{4, 4, 1, 192, 192, 60}),
    [](const auto& test) {
      return "ranks" + std::to_string(test.param.num_ranks) + "experts" +
             std::to_string(test.param.num_experts) + "slots" + std::to_string(test.param.top_k);
    });

void run_one(const WorkspaceDims& dims, std::int64_t num_tokens, Pattern pattern) {
  LayerRanks layers(dims);
  CaseMaker cases(dims, 17);
  std::vector<RankInput> inputs;
  for (int r = 0; r < dims.routing.num_ranks; ++r) {
    inputs.push_back(cases.rank_input(num_tokens, pattern));
  }
  for (const Memory memory : {Memory::recompute, Memory::saved}) {
    layers.set(memory, {});
    run_and_compare(layers, inputs);
  }
}

TEST(Overlap, WideRows) {
  MEGAMOE_SKIP_WITHOUT_DEVICE();
  for (const std::int64_t hidden : {2048, 2112, 4096, 7168}) {
    SCOPED_TRACE(hidden);
    run_one(layer_dims(2, 16, 8, 300, hidden, 192), 300, Pattern::uniform);
  }
}

TEST(Overlap, ManyTokens) {
  MEGAMOE_SKIP_WITHOUT_DEVICE();
  run_one(layer_dims(2, 32, 4, 4096, 512, 256), 4096, Pattern::uniform);
  run_one(layer_dims(2, 32, 4, 4096, 512, 256), 4096, Pattern::skewed);
  run_one(layer_dims(1, 16, 4, 4096, 1024, 256), 4096, Pattern::holes);
}

TEST(Overlap, ARankWithoutTokens) {
  MEGAMOE_SKIP_WITHOUT_DEVICE();
  const WorkspaceDims dims = layer_dims(2, 16, 4, 200, 256, 128);
  LayerRanks layers(dims);
  CaseMaker cases(dims, 5);
  for (const int empty : {0, 1}) {
    std::vector<RankInput> inputs;
    for (int r = 0; r < 2; ++r) {
      inputs.push_back(cases.rank_input(r == empty ? 0 : 200, Pattern::uniform));
    }
    run_and_compare(layers, inputs);
  }
  run_and_compare(layers,
                  {cases.rank_input(0, Pattern::uniform), cases.rank_input(0, Pattern::uniform)});
}

void repeat_calls(Memory memory) {
  constexpr int kRepetitions = 600;
  const WorkspaceDims dims = layer_dims(2, 32, 4, 1024, 1024, 256);
  LayerRanks layers(dims);
  layers.set(memory, {});
  CaseMaker cases(dims, 23);
  std::vector<RankInput> inputs;
  for (int r = 0; r < 2; ++r) inputs.push_back(cases.rank_input(1024, Pattern::uniform));
  layers.upload(inputs);
  std::vector<unsigned long long> forward;
  std::vector<unsigned long long> backward;
  for (int call = 0; call <= kRepetitions && !::testing::Test::HasFailure(); ++call) {
    SCOPED_TRACE(call);
    const Overlap overlap = call == 0 ? Overlap::off : Overlap::on;
    layers.poison();
    layers.forward(overlap);
    const std::vector<unsigned long long> forward_bits = layers.bits();
    layers.poison();
    layers.backward(overlap);
    const std::vector<unsigned long long> backward_bits = layers.bits();
    if (call == 0) {
      forward = forward_bits;
      backward = backward_bits;
    }
    expect_same_bits(forward, forward_bits);
    expect_same_bits(backward, backward_bits);
  }
  EXPECT_FALSE(layers.failed());
}

TEST(Overlap, RepeatedCallsLeaveTheSameBits) {
  MEGAMOE_SKIP_WITHOUT_DEVICE();
  repeat_calls(Memory::recompute);
}

TEST(Overlap, RepeatedCallsWithSavedGateAndUpLeaveTheSameBits) {
  MEGAMOE_SKIP_WITHOUT_DEVICE();
  repeat_calls(Memory::saved);
}

TEST(Overlap, GraphsOfSeveralSizesReplay) {
  MEGAMOE_SKIP_WITHOUT_DEVICE();
  const WorkspaceDims dims = layer_dims(2, 16, 4, 500, 512, 192);
  LayerRanks layers(dims);
  CaseMaker cases(dims, 29);
  std::vector<RankInput> inputs;
  for (int r = 0; r < 2; ++r) inputs.push_back(cases.rank_input(500, Pattern::uniform));
  layers.upload(inputs);
  const std::vector<std::int64_t> sizes = {500, 7, 130};
  std::vector<std::vector<unsigned long long>> expected;
  std::vector<std::vector<cudaGraphExec_t>> graphs;
  for (const std::int64_t size : sizes) {
    for (int r = 0; r < 2; ++r) layers.layer(r).rank().num_tokens = size;
    layers.poison();
    layers.forward(Overlap::off);
    expected.push_back(layers.bits());
    graphs.emplace_back();
    for (int r = 0; r < 2; ++r) {
      cudaStream_t stream = layers.layer(r).rank().stream;
      cudaGraph_t graph = nullptr;
      cudaGraphExec_t exec = nullptr;
      check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
      layers.layer(r).enqueue_forward(Overlap::on, layers.options);
      check_cuda(cudaStreamEndCapture(stream, &graph), "end of capture");
      check_cuda(cudaGraphInstantiate(&exec, graph, 0), "instantiate");
      check_cuda(cudaGraphUpload(exec, stream), "upload of a graph");
      check_cuda(cudaGraphDestroy(graph), "destroy");
      graphs.back().push_back(exec);
    }
    layers.ranks().synchronize();
  }
  std::mt19937 random(5);
  for (int call = 0; call < 60 && !::testing::Test::HasFailure(); ++call) {
    const std::size_t which = random() % sizes.size();
    SCOPED_TRACE("call " + std::to_string(call) + ", tokens " + std::to_string(sizes[which]));
    layers.poison();
    layers.ranks().synchronize();
    for (int r = 0; r < 2; ++r) {
      check_cuda(cudaGraphLaunch(graphs[which][r], layers.layer(r).rank().stream), "graph launch");
    }
    layers.ranks().synchronize();
    expect_same_bits(expected[which], layers.bits());
  }
  for (const auto& of_size : graphs) {
    for (cudaGraphExec_t exec : of_size) cudaGraphExecDestroy(exec);
  }
}

/// A call that fails at its entry writes nothing, and the next one works.
TEST(Overlap, AFailedCallBetweenGoodOnes) {
  MEGAMOE_SKIP_WITHOUT_DEVICE();
  const WorkspaceDims dims = layer_dims(2, 16, 4, 200, 256, 128);
  LayerRanks layers(dims);
  CaseMaker cases(dims, 31);
  std::vector<RankInput> good = {cases.rank_input(200, Pattern::uniform),
                                 cases.rank_input(64, Pattern::holes)};
  std::vector<RankInput> bad = good;
  bad[1].ids[0] = 1000;
  run_and_compare(layers, good);
  layers.upload(bad);
  layers.poison();
  const std::vector<unsigned long long> untouched = layers.bits();
  layers.forward(Overlap::on);
  for (int r = 0; r < 2; ++r) {
    device::FailureRecord& record = *layers.layer(r).rank().view.failure;
    EXPECT_EQ(record.code, device::FailureCode::expert_id_out_of_range);
    record.is_set = 0;
  }
  expect_same_bits(untouched, layers.bits());
  run_and_compare(layers, good);
}

/// Rows that never arrive fail the call for good on both ranks, and all kernels end.
TEST(Overlap, RowsThatNeverArriveAreReported) {
  MEGAMOE_SKIP_WITHOUT_DEVICE();
  const WorkspaceDims dims = layer_dims(2, 4, 2, 100, 256, 128);
  LayerRanks layers(dims);
  CaseMaker cases(dims, 37);
  layers.upload({cases.rank_input(100, Pattern::uniform), cases.rank_input(100, Pattern::uniform)});
  layers.poison();
  layers.layer(0).rank().view.inner_deadline_ns = 300'000'000;
  for (int r = 0; r < 2; ++r) {
    LayerRank& layer = layers.layer(r);
    GpuRank& rank = layer.rank();
    products::LaunchOptions options = layers.options;
    options.stream = rank.stream;
    layer.enqueue_forward_plan();
    gpu::order_pulls(rank.view, layer.plan(), layer.forward_rows(), rank.stream);
    if (r == 0) {  // so that blocks with pads never become complete
      const Region<std::uint32_t>& counters = rank.view.scratch_layout.rows_arrived;
      check_cuda(
          cudaMemsetAsync(counters.in(rank.scratch.data()), 0, counters.count * 4, rank.stream),
          "counters");
    }
    gpu::gate_up_and_pull(rank.view, layer.plan(), {}, layer.forward_rows(), layer.tensors({}, {}),
                          options);
    gpu::down_and_push(rank.view, layer.plan(), rank.origin_C.data(), layer.a_CI(),
                       layer.experts().down(), options);
    gpu::meet(rank.view, layer.plan(), device::Signal::results_sent, rank.stream);
    gpu::reduce_outputs(rank.view, layer.plan(), rank.output(), rank.num_tokens, rank.stream);
  }
  layers.ranks().synchronize();
  const device::FailureRecord& record = *layers.layer(0).rank().view.failure;
  EXPECT_EQ(record.code, device::FailureCode::rows_late);
  EXPECT_EQ(record.expected, 64U);
  EXPECT_LT(record.seen, 64U);
  EXPECT_EQ(record.value % 64, 0);
  EXPECT_EQ(layers.layer(1).rank().view.failure->code, device::FailureCode::peer_failed);
  for (int r = 0; r < 2; ++r) {
    for (const bf16& value : layers.layer(r).rank().out.download()) {
      ASSERT_EQ(value.bits, 0xffff);
    }
  }
}

/// x that never arrives fails the call under the weight gradients: those that read x are not
/// written, and what the call launches afterwards does nothing.
TEST(Overlap, XThatNeverArrivesIsReportedAndNotMultiplied) {
  MEGAMOE_SKIP_WITHOUT_DEVICE();
  constexpr std::int64_t kHidden = 256, kIntermediate = 128, kExperts = 4;
  const WorkspaceDims dims = layer_dims(1, kExperts, 2, 100, kHidden, kIntermediate);
  LayerRanks layers(dims);
  CaseMaker cases(dims, 41);
  layers.set(Memory::saved, {});
  layers.upload({cases.rank_input(100, Pattern::uniform)});
  layers.poison();
  layers.forward(Overlap::on);
  LayerRank& layer = layers.layer(0);
  GpuRank& rank = layer.rank();
  rank.view.inner_deadline_ns = 300'000'000;
  products::LaunchOptions options = layers.options;
  options.stream = rank.stream;
  DeviceBuffer<bf16> ddown(kExperts * kHidden * kIntermediate), dup(ddown.size()),
      dgate(ddown.size());
  const auto poison_gradients = [&] {
    for (DeviceBuffer<bf16>* gradient : {&ddown, &dup, &dgate}) gradient->poison();
    layers.ranks().synchronize();
  };
  const auto is_untouched = [](const DeviceBuffer<bf16>& buffer) {
    const std::vector<bf16> values = buffer.download();
    return std::all_of(values.begin(), values.end(),
                       [](const bf16& value) { return value.bits == 0xffff; });
  };
  const auto rows_of = [&](const DeviceBuffer<bf16>& buffer) {
    return ConstTensorView(tensor_view(buffer.data(), {rank.capacity, kHidden}));
  };
  const auto enqueue_weight_gradients = [&] {
    const products::WeightGradient gradients[] = {
        {rows_of(rank.dy_CH), layer.a_CI(),
         tensor_view(ddown.data(), {kExperts, kHidden, kIntermediate})},
        {layer.du_CI(), rows_of(rank.x_CH),
         tensor_view(dup.data(), {kExperts, kIntermediate, kHidden})},
        {layer.dg_CI(), rows_of(rank.x_CH),
         tensor_view(dgate.data(), {kExperts, kIntermediate, kHidden})}};
    gpu::RowsBeside beside;
    beside.x_CH = rank.x_CH.data();
    beside.dx_TH = rank.output();
    beside.dweights_TK = {rank.dweights.data(), id_stride(rank.view.dims)};
    beside.num_tokens = rank.num_tokens;
    gpu::weight_gradients_beside_rows(rank.view, layer.plan(), gradients,
                                      products::GradientMode::store, beside, options);
  };
  poison_gradients();
  layer.enqueue_backward_plan();
  gpu::order_pulls(rank.view, layer.plan(), layer.backward_rows(), rank.stream);
  // One pull counts as taken, by nobody.
  PullProgress* progress = rank.view.scratch_layout.pull_progress.in(rank.scratch.data()) +
                           static_cast<int>(PulledBy::weight_gradients);
  check_cuda(cudaMemsetAsync(&progress->next, 1, 1, rank.stream), "the next pull");
  gpu::gate_up_gradient_and_pull(rank.view, layer.groups(), {}, layer.backward_rows(),
                                 layer.experts().down(), layer.kept_g_CI(), layer.kept_u_CI(),
                                 layer.gradients(), gpu::LastPass::by_weight_gradients, options);
  gpu::announce(rank.view, device::Signal::gradients_sent, rank.stream);
  enqueue_weight_gradients();
  layers.ranks().synchronize();
  const device::FailureRecord& record = *rank.view.failure;
  EXPECT_EQ(record.code, device::FailureCode::rows_late);
  EXPECT_EQ(record.seen + 1, record.expected);
  EXPECT_FALSE(is_untouched(ddown));
  EXPECT_TRUE(is_untouched(dup));
  EXPECT_TRUE(is_untouched(dgate));
  poison_gradients();
  enqueue_weight_gradients();
  layers.ranks().synchronize();
  EXPECT_TRUE(is_untouched(ddown));
}

}  // namespace
}  // namespace megamoe::testing
