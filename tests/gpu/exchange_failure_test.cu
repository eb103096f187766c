// What goes wrong on the device: every rank learns the same, nothing is written, nothing hangs.
#include <atomic>
#include <chrono>
#include <thread>

#include "cuda/runtime.h"
#include "gpu/exchange_world.cuh"
#include "kernels/failure.h"

namespace megamoe::testing {
namespace {

using device::FailureCode;
using device::FailureRecord;
using device::Signal;

constexpr std::int64_t kTokens = 16;
constexpr std::uint64_t kSecond_ns = 1'000'000'000;

class ExchangeFailure : public ::testing::Test {
 protected:
  void SetUp() override { MEGAMOE_SKIP_WITHOUT_DEVICE(); }

  static WorkspaceDims dims() { return exchange_dims(2, 8, 2, kTokens, 64); }

  static std::vector<RankInput> inputs_of(CaseMaker& cases) {
    return {cases.rank_input(kTokens, Pattern::uniform), cases.rank_input(9, Pattern::holes)};
  }

  static const FailureRecord& record(ExchangeWorld& world, int rank) {
    return *world.gpu().rank(rank).view.failure;
  }
  static void clear_records(ExchangeWorld& world) {
    for (int r = 0; r < world.gpu().num_ranks(); ++r) {
      std::memset(static_cast<void*>(world.gpu().rank(r).view.failure), 0, sizeof(FailureRecord));
    }
  }

  template <class T>
  static bool is_poison(const DeviceBuffer<T>& buffer) {
    const std::vector<T> values = buffer.download();
    const auto* bytes = reinterpret_cast<const unsigned char*>(values.data());
    return std::all_of(bytes, bytes + values.size() * sizeof(T),
                       [](unsigned char byte) { return byte == 0xff; });
  }
  static void expect_no_output(ExchangeWorld& world) {
    for (int r = 0; r < world.gpu().num_ranks(); ++r) {
      const GpuRank& rank = world.gpu().rank(r);
      EXPECT_TRUE(is_poison(rank.out)) << "rank " << r;
      EXPECT_TRUE(is_poison(rank.dweights)) << "rank " << r;
      EXPECT_TRUE(is_poison(rank.x_CH)) << "rank " << r;
      for (const std::int32_t count : rank.download(rank.view.plan_layout.group_count_e)) {
        EXPECT_EQ(count, 0) << "rank " << r;
      }
    }
  }
};

TEST_F(ExchangeFailure, BadIdFailsTheCallOnEveryRankAndLeavesTheGroupUsable) {
  ExchangeWorld world(dims());
  const WorkspaceDims sizes = dims();
  CaseMaker cases(sizes, 1);
  std::vector<RankInput> inputs = inputs_of(cases);
  inputs[1].ids[5 * id_stride(sizes)] = -2;
  inputs[1].ids[3 * id_stride(sizes) + 1] = 8;
  world.prepare(cases, inputs);
  world.gpu().forward(Pull::through_registers);
  for (int r = 0; r < 2; ++r) {
    EXPECT_EQ(record(world, r).is_set, 1U);
    EXPECT_EQ(record(world, r).code, FailureCode::expert_id_out_of_range);
    EXPECT_EQ(record(world, r).peer, 1);
    EXPECT_EQ(record(world, r).token, 3);
    EXPECT_EQ(record(world, r).slot, 1);
    EXPECT_EQ(record(world, r).value, 8);
    EXPECT_EQ(gpu::to_error(record(world, r)).code(), ErrorCode::expert_id_out_of_range);
  }
  expect_no_output(world);

  clear_records(world);
  world.gpu().backward(Pull::through_registers);
  EXPECT_EQ(record(world, 0).code, FailureCode::forward_failed);
  EXPECT_EQ(record(world, 1).code, FailureCode::forward_failed);
  expect_no_output(world);

  clear_records(world);
  world.run_and_compare(cases, inputs_of(cases), Pull::in_bulk);
}

TEST_F(ExchangeFailure, TooSmallCapacityNamesNeedAndCapacity) {
  WorkspaceDims sizes = dims();
  sizes.row_capacity = 50;
  ExchangeWorld world(sizes);
  CaseMaker cases(sizes, 2);
  const std::vector<RankInput> inputs = {cases.rank_input(kTokens, Pattern::one_expert),
                                         cases.rank_input(kTokens, Pattern::one_expert)};
  world.prepare(cases, inputs);
  world.gpu().forward(Pull::through_registers);
  for (int r = 0; r < 2; ++r) {
    EXPECT_EQ(record(world, r).code, FailureCode::capacity_exceeded);
    EXPECT_EQ(record(world, r).peer, 1);
    EXPECT_EQ(record(world, r).need, 64);
    EXPECT_EQ(record(world, r).capacity, 50);
  }
  expect_no_output(world);
  clear_records(world);
  const std::vector<RankInput> fitting = {cases.rank_input(12, Pattern::one_expert),
                                          cases.rank_input(13, Pattern::one_expert)};
  world.run_and_compare(cases, fitting, Pull::through_registers);
}

TEST_F(ExchangeFailure, PeerThatNeverEntersIsNamedAndLaterCallsExit) {
  ExchangeWorld world(dims());
  const WorkspaceDims sizes = dims();
  CaseMaker cases(sizes, 3);
  world.prepare(cases, inputs_of(cases));
  world.gpu().rank(0).view.entry_deadline_ns = kSecond_ns;
  world.gpu().synchronize();
  const auto start = std::chrono::steady_clock::now();
  world.gpu().rank(0).enqueue_forward(Pull::through_registers);
  world.gpu().synchronize();
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  EXPECT_GE(seconds, 0.99);
  EXPECT_LT(seconds, 2.0);
  EXPECT_EQ(record(world, 0).code, FailureCode::deadline_exceeded);
  EXPECT_EQ(record(world, 0).rank, 0);
  EXPECT_EQ(record(world, 0).peer, 1);
  EXPECT_EQ(record(world, 0).awaited, Signal::entered);
  EXPECT_EQ(record(world, 0).expected, 1U);
  EXPECT_EQ(record(world, 0).seen, 0U);

  // The survivor no longer waits, and the late peer learns who has failed.
  const auto again = std::chrono::steady_clock::now();
  world.gpu().forward(Pull::in_bulk);
  EXPECT_LT(std::chrono::duration<double>(std::chrono::steady_clock::now() - again).count(), 0.5);
  EXPECT_EQ(record(world, 0).code, FailureCode::deadline_exceeded);
  EXPECT_EQ(record(world, 0).expected, 1U);
  EXPECT_EQ(record(world, 1).code, FailureCode::peer_failed);
  EXPECT_EQ(record(world, 1).peer, 0);
  for (int r = 0; r < 2; ++r) {
    EXPECT_TRUE(is_poison(world.gpu().rank(r).out));
    EXPECT_TRUE(is_poison(world.gpu().rank(r).x_CH));
  }
}

TEST_F(ExchangeFailure, PeerThatStopsInsideTheCallIsNamed) {
  ExchangeWorld world(dims());
  const WorkspaceDims sizes = dims();
  CaseMaker cases(sizes, 4);
  world.prepare(cases, inputs_of(cases));
  world.gpu().rank(0).view.inner_deadline_ns = kSecond_ns / 2;
  world.gpu().synchronize();
  GpuRank& stops = world.gpu().rank(1);
  gpu::count_slots(stops.view, stops.plan.data(), stops.routing_input(), stops.num_tokens,
                   stops.stream);
  gpu::enter_call(stops.view, stops.plan.data(), gpu::CallKind::forward, kForwardCall,
                  stops.num_tokens, stops.stream);
  world.gpu().rank(0).enqueue_forward(Pull::through_registers);
  world.gpu().synchronize();
  EXPECT_EQ(record(world, 1).is_set, 0U);
  EXPECT_EQ(record(world, 0).code, FailureCode::deadline_exceeded);
  EXPECT_EQ(record(world, 0).peer, 1);
  EXPECT_EQ(record(world, 0).awaited, Signal::rows_staged);
  EXPECT_TRUE(is_poison(world.gpu().rank(0).out));
}

TEST_F(ExchangeFailure, ARankThatHasLeftEndsOnlyWaitsForWhatItHasNotSent) {
  const WorkspaceDims sizes = exchange_dims(3, 9, 2, kTokens, 64);
  ExchangeWorld world(sizes);
  CaseMaker cases(sizes, 8);
  const std::vector<RankInput> inputs = {cases.rank_input(kTokens, Pattern::uniform),
                                         cases.rank_input(9, Pattern::holes),
                                         cases.rank_input(3, Pattern::uniform)};
  world.prepare(cases, inputs);
  const cuda::HostWords has_left_R(3);
  for (int r = 0; r < 3; ++r) world.gpu().rank(r).view.has_left_R = has_left_R.get();
  world.gpu().synchronize();
  for (const int r : {0, 1}) world.gpu().rank(r).enqueue_forward(Pull::through_registers);
  std::atomic_ref(has_left_R.get()[1]).store(1);
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  for (const int r : {0, 1}) {  // they still wait for rank 2
    EXPECT_EQ(cudaStreamQuery(world.gpu().rank(r).stream), cudaErrorNotReady);
  }
  world.gpu().rank(2).enqueue_forward(Pull::through_registers);
  world.gpu().synchronize();
  world.host().forward(inputs, world.results());
  world.compare_all(ExchangeWorld::Direction::forward);

  const auto start = std::chrono::steady_clock::now();
  for (const int r : {0, 2}) world.gpu().rank(r).enqueue_forward(Pull::through_registers);
  world.gpu().synchronize();
  EXPECT_LT(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(), 1.0);
  for (const int r : {0, 2}) {
    EXPECT_EQ(record(world, r).code, FailureCode::peer_failed);
    EXPECT_EQ(record(world, r).peer, 1);
    EXPECT_EQ(record(world, r).awaited, Signal::entered);
  }
}

TEST_F(ExchangeFailure, PeerThatGivesUpBeforeOrInsideTheCallIsNamedAtOnce) {
  for (const bool enters : {false, true}) {
    ExchangeWorld world(dims());
    const WorkspaceDims sizes = dims();
    CaseMaker cases(sizes, 6);
    world.prepare(cases, inputs_of(cases));
    world.gpu().synchronize();
    const auto start = std::chrono::steady_clock::now();
    GpuRank& gives_up = world.gpu().rank(1);
    if (enters) {
      gpu::count_slots(gives_up.view, gives_up.plan.data(), gives_up.routing_input(),
                       gives_up.num_tokens, gives_up.stream);
      gpu::enter_call(gives_up.view, gives_up.plan.data(), gpu::CallKind::forward, kForwardCall,
                      gives_up.num_tokens, gives_up.stream);
    }
    world.gpu().rank(0).enqueue_forward(Pull::through_registers);
    gpu::give_up(gives_up.view, gives_up.stream);
    world.gpu().synchronize();
    EXPECT_LT(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(), 1.0);
    EXPECT_EQ(record(world, 1).is_set, 0U);
    EXPECT_EQ(record(world, 0).code, FailureCode::peer_failed) << enters;
    EXPECT_EQ(record(world, 0).peer, 1);
    EXPECT_TRUE(is_poison(world.gpu().rank(0).out));
    // Later calls wait for nobody.
    world.gpu().forward(Pull::through_registers);
    EXPECT_TRUE(is_poison(gives_up.out));
    EXPECT_LT(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(), 1.0);
  }
}

TEST_F(ExchangeFailure, RanksThatMakeDifferentCallsAreNamed) {
  ExchangeWorld world(dims());
  const WorkspaceDims sizes = dims();
  CaseMaker cases(sizes, 5);
  world.prepare(cases, inputs_of(cases));
  world.gpu().synchronize();
  for (int r = 0; r < 2; ++r) {
    GpuRank& rank = world.gpu().rank(r);
    gpu::count_slots(rank.view, rank.plan.data(), rank.routing_input(), rank.num_tokens,
                     rank.stream);
    gpu::enter_call(rank.view, rank.plan.data(), gpu::CallKind::forward, kForwardCall + 16 * r,
                    rank.num_tokens, rank.stream);
  }
  world.gpu().synchronize();
  for (int r = 0; r < 2; ++r) {
    EXPECT_EQ(record(world, r).code, FailureCode::calls_differ);
    EXPECT_EQ(record(world, r).peer, 1);
  }
  clear_records(world);
  world.run_and_compare(cases, inputs_of(cases), Pull::through_registers);
}

}  // namespace
}  // namespace megamoe::testing
