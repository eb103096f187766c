// Plan, exchange and reduction on the device against the CPU backend's functions: every byte that
// they write, and that they write no other.
#include "gpu/exchange_world.cuh"

namespace megamoe::testing {
namespace {

struct Group {
  int num_ranks;
  int num_experts;
  int top_k;
  int num_calls;
};

class RandomRoutings : public ::testing::TestWithParam<Group> {};

TEST_P(RandomRoutings, EqualTheCpu) {
  MEGAMOE_SKIP_WITHOUT_DEVICE();
  const Group& group = GetParam();
  const WorkspaceDims dims =
      exchange_dims(group.num_ranks, group.num_experts, group.top_k, 257, 64);
  ExchangeWorld world(dims);
  CaseMaker cases(dims, 1000 + group.num_experts);
  for (int call = 0; call < group.num_calls && !HasFailure(); ++call) {
    const Pattern pattern = cases.any_pattern();
    SCOPED_TRACE("call " + std::to_string(call) + ", pattern " +
                 std::to_string(static_cast<int>(pattern)));
    world.run_and_compare(cases, cases.group_input(pattern),
                          call % 2 == 0 ? Pull::through_registers : Pull::in_bulk);
  }
}

INSTANTIATE_TEST_SUITE_P(Groups, RandomRoutings,
                         ::testing::Values(Group{1, 8, 2, 400}, Group{1, 512, 16, 40},
                                           Group{2, 8, 3, 400}, Group{2, 128, 8, 150},
                                           Group{2, 60, 4, 300}, Group{3, 12, 4, 300},
                                           Group{4, 64, 8, 60}, Group{4, 512, 16, 20},
                                           Group{4, 4, 1, 300}),
                         [](const auto& test) {
                           return "ranks" + std::to_string(test.param.num_ranks) + "experts" +
                                  std::to_string(test.param.num_experts) + "slots" +
                                  std::to_string(test.param.top_k);
                         });

void run_one(const WorkspaceDims& dims, std::int64_t num_tokens, Pattern pattern) {
  ExchangeWorld world(dims);
  CaseMaker cases(dims, 7);
  std::vector<RankInput> inputs;
  for (int r = 0; r < dims.routing.num_ranks; ++r) {
    inputs.push_back(cases.rank_input(num_tokens, pattern));
  }
  for (const Pull how : {Pull::through_registers, Pull::in_bulk}) {
    world.run_and_compare(cases, inputs, how);
  }
}

WorkspaceDims narrow(WorkspaceDims dims, std::int64_t row_capacity) {
  dims.intermediate_dim = 64;
  dims.row_capacity = row_capacity;
  return dims;
}

TEST(Exchange, ManyTokens) {
  MEGAMOE_SKIP_WITHOUT_DEVICE();
  run_one(narrow(exchange_dims(2, 128, 8, 8192, 64), 80000), 8192, Pattern::uniform);
  run_one(narrow(exchange_dims(2, 512, 16, 16384, 64), 200000), 16384, Pattern::holes);
  run_one(narrow(exchange_dims(2, 128, 8, 20000, 64), 300000), 20000, Pattern::skewed);
}

TEST(Exchange, WideRows) {
  MEGAMOE_SKIP_WITHOUT_DEVICE();
  for (const std::int64_t hidden : {192, 2048, 2112, 4096, 7168}) {
    SCOPED_TRACE(hidden);
    run_one(exchange_dims(2, 16, 8, 100, hidden), 100, Pattern::holes);
  }
}

TEST(Exchange, ManyRanks) {
  MEGAMOE_SKIP_WITHOUT_DEVICE();
  run_one(exchange_dims(8, 64, 8, 64, 64), 64, Pattern::holes);
}

/// One rank of a large group, whose peers have entered the call before it: the host writes what
/// they would have sent.
class LonelyRank {
 public:
  LonelyRank(const WorkspaceDims& dims, int rank)
      : dims_(dims), gpu_(dims, rank), of_peers_(gpu_.symmetric.size()) {
    CaseMaker cases(dims, 100 + rank);
    inputs_ = cases.group_input(Pattern::holes);
    const RoutingDims& routing = dims.routing;
    counts_RE_.resize(routing.num_ranks * routing.num_experts);
    for (int r = 0; r < routing.num_ranks; ++r) {
      count_slots(routing, inputs_[r].ids.data(), inputs_[r].num_tokens, id_stride(dims),
                  counts_RE_.data() + r * routing.num_experts);
    }
    for (std::byte*& base : gpu_.view.symmetric_R) base = of_peers_.data();
    gpu_.view.symmetric_R[rank] = gpu_.symmetric.data();
    gpu_.poison();
    gpu_.upload(inputs_[rank]);
  }

  void plan() {
    constexpr std::uint64_t kEpoch = 1;
    const int num_ranks = dims_.routing.num_ranks;
    const std::vector<device::SignalValue> signals(num_ranks, 2 * kEpoch);
    device::CallHeader header{};
    header.identity = {kForwardCall, 0};
    const gpu::RankView& view = gpu_.view;
    write(view.signal(device::Signal::entered, view.rank, 0), signals);
    write(view.header(kEpoch, view.rank, 0), std::vector<device::CallHeader>(num_ranks, header));
    write(view.counts_RE(kEpoch, view.rank), counts_RE_);
    std::byte* plan = gpu_.plan.data();
    gpu::load_exchange_kernels();
    gpu::count_slots(view, plan, gpu_.routing_input(), gpu_.num_tokens, gpu_.stream);
    gpu::enter_call(view, plan, gpu::CallKind::forward, kForwardCall, gpu_.num_tokens, gpu_.stream);
    gpu::write_pull_lists(view, plan, gpu_.num_tokens, gpu_.stream);
    check_cuda(cudaDeviceSynchronize(), "plan");
    EXPECT_EQ(view.failure->is_set, 0U);
  }

  void compare() {
    const RoutingDims& routing = dims_.routing;
    const int rank = gpu_.view.rank;
    const std::vector<std::int32_t> ids_TK = dense_ids(inputs_[rank]);
    std::vector<std::int64_t> begin(routing.num_ranks + 1);
    std::vector<PullToken> tokens(max_pull_tokens(routing, inputs_[rank].num_tokens) + 1);
    std::vector<PullSlot> slots(ids_TK.size() + 1);
    PlanScratch scratch;
    build_pull_lists(routing, counts_RE_.data(), rank, ids_TK, kGpuRowAlignment, scratch,
                     {begin.data(), tokens.data(), slots.data()});
    const std::vector<std::byte> symmetric = gpu_.symmetric.download();
    const auto same = [&](const auto& expected, std::int64_t count, std::int64_t offset) {
      return std::memcmp(expected.data(), symmetric.data() + offset, count * sizeof(expected[0])) ==
             0;
    };
    const SymmetricLayout& layout = gpu_.view.symmetric.exchange;
    const auto num_filled =
        std::count_if(ids_TK.begin(), ids_TK.end(), [](std::int32_t id) { return id >= 0; });
    EXPECT_TRUE(same(begin, routing.num_ranks + 1, layout.destination_begin.offset));
    EXPECT_TRUE(same(tokens, begin.back(), layout.pull_tokens.offset));
    EXPECT_TRUE(same(slots, num_filled, layout.pull_slots.offset));
    std::vector<std::int64_t> expert_begin(routing.experts_per_rank() + 1);
    expert_offsets(routing, counts_RE_.data(), rank, kGpuRowAlignment, expert_begin.data());
    EXPECT_EQ(gpu_.download(gpu_.view.plan_layout.expert_begin), expert_begin);
  }

 private:
  template <class T>
  static void write(T* to, const std::vector<T>& values) {
    check_cuda(cudaMemcpy(to, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice),
               "what peers sent");
  }
  [[nodiscard]] std::vector<std::int32_t> dense_ids(const RankInput& input) const {
    std::vector<std::int32_t> dense;
    for (std::int64_t token = 0; token < input.num_tokens; ++token) {
      const auto row = input.ids.begin() + token * id_stride(dims_);
      dense.insert(dense.end(), row, row + dims_.routing.top_k);
    }
    return dense;
  }

  WorkspaceDims dims_;
  GpuRank gpu_;
  DeviceBuffer<std::byte> of_peers_;
  std::vector<RankInput> inputs_;
  std::vector<std::int32_t> counts_RE_;
};

TEST(Exchange, PlanAmongSeventyTwoRanks) {
  MEGAMOE_SKIP_WITHOUT_DEVICE();
  for (const int num_experts : {72, 360, 504}) {
    for (const int top_k : {3, 16}) {
      const WorkspaceDims dims = narrow(exchange_dims(72, num_experts, top_k, 257, 64), 40000);
      for (const int rank : {0, 41, 71}) {
        SCOPED_TRACE("rank " + std::to_string(rank));
        LonelyRank lonely(dims, rank);
        lonely.plan();
        lonely.compare();
      }
    }
  }
}

TEST(Exchange, RefusesMoreTokensThanTheBuffersHold) {
  const gpu::RankView view = gpu::make_rank_view(exchange_dims(1, 8, 2, 16, 64), 0);
  EXPECT_THROW(gpu::count_slots(view, nullptr, {}, 17, nullptr), Error);
  EXPECT_THROW(gpu::enter_call(view, nullptr, gpu::CallKind::forward, kForwardCall, 17, nullptr),
               Error);
  EXPECT_THROW(gpu::stage_forward(view, {}, 17, nullptr), Error);
  EXPECT_THROW(gpu::reduce_outputs(view, nullptr, {}, -1, nullptr), Error);
}

TEST(Exchange, RefusesWhatItCannotNumber) {
  EXPECT_THROW(gpu::make_rank_view(exchange_dims(1, 1024, 8, 16, 64), 0), Error);
  EXPECT_THROW(gpu::make_rank_view(exchange_dims(1, 8, 17, 16, 64), 0), Error);
  EXPECT_THROW(gpu::make_rank_view(exchange_dims(1, 8, 2, 16, 96), 0), Error);
  EXPECT_THROW(gpu::make_rank_view(exchange_dims(73, 73, 2, 16, 64), 0), Error);
  EXPECT_THROW(gpu::make_rank_view(exchange_dims(64, 64, 16, 1 << 22, 64), 0), Error);
}

}  // namespace
}  // namespace megamoe::testing
