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
                         ::testing::Values(Group{1, 8, 2, 400}, Group{1, 512, 16, 60},
                                           Group{2, 8, 3, 400}, Group{2, 128, 8, 200},
                                           Group{2, 60, 4, 300}, Group{3, 12, 4, 300},
                                           Group{4, 64, 8, 150}, Group{4, 512, 16, 40},
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

TEST(Exchange, RefusesWhatItCannotNumber) {
  EXPECT_THROW(gpu::make_rank_view(exchange_dims(1, 1024, 8, 16, 64), 0), Error);
  EXPECT_THROW(gpu::make_rank_view(exchange_dims(1, 8, 17, 16, 64), 0), Error);
  EXPECT_THROW(gpu::make_rank_view(exchange_dims(1, 8, 2, 16, 96), 0), Error);
  EXPECT_THROW(gpu::make_rank_view(exchange_dims(73, 73, 2, 16, 64), 0), Error);
  EXPECT_THROW(gpu::make_rank_view(exchange_dims(64, 64, 16, 1 << 22, 64), 0), Error);
}

}  // namespace
}  // namespace megamoe::testing
