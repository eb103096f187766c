// The rules of the memory model, one short program each: two agents of two CTAs of one rank, which
// run one after the other as far as they can.
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "schedule/checker.h"
#include "schedule/layer_builder.h"

namespace megamoe::checker {
namespace {

constexpr DatumId kRow = 0;     // in global memory
constexpr DatumId kStage0 = 1;  // in the first CTA's shared memory
constexpr DatumId kStage1 = 2;  // in the second's
constexpr std::uint32_t kBarrier0 = 0;
constexpr std::uint32_t kBarrier1 = 1;
constexpr std::uint64_t kOne = 2;
constexpr std::uint64_t kTwo = 4;

class OneKernel : public KernelSource {
 public:
  explicit OneKernel(Kernel kernel) : kernel_(std::make_shared<const Kernel>(std::move(kernel))) {}
  std::shared_ptr<const Kernel> kernel(std::uint32_t rank, std::uint32_t index,
                                       const RankControl& /*control*/) const override {
    return rank == 0 && index == 0 ? kernel_ : nullptr;
  }
  void expand(std::uint32_t /*rank*/, std::uint32_t /*index*/, std::uint32_t /*cta*/, Does /*what*/,
              Registers& /*registers*/, Program& /*steps*/) const override {}

 private:
  std::shared_ptr<const Kernel> kernel_;
};

/// What is wrong with the two programs; empty: nothing.
std::string run(Program first, Program second, Fences of_row = Fences::writer_and_reader) {
  Hardware hardware;
  hardware.memory.add_array("row", Space::global, 0, 1, of_row);
  hardware.shared_R.push_back(hardware.memory.add_array("stage", Space::shared, 0, 2));
  hardware.shared_per_cta = 1;
  hardware.barriers_per_cta = 1;
  hardware.barriers.resize(2);
  hardware.counters.resize(1);
  Kernel kernel;
  kernel.agents = {{"first", 0, std::move(first)}, {"second", 1, std::move(second)}};
  try {
    Machine machine(hardware, std::make_shared<OneKernel>(kernel));
    bool moved = true;
    while (moved && !machine.has_ended()) {
      moved = false;
      for (std::uint32_t agent = 0; agent < machine.num_agents(0); ++agent) {
        while (!machine.has_ended() && machine.next_step({0, agent}) != Machine::Step::none) {
          machine.step({0, agent});
          moved = true;
        }
      }
    }
    return machine.has_ended() ? "" : "nobody can go on";
  } catch (const Violation& violation) {
    return violation.what();
  }
}

testing::AssertionResult says(const std::string& report, const std::string& part) {
  if (report.find(part) != std::string::npos) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "\"" << report << "\" does not say \"" << part << "\"";
}

Op store_row(std::uint64_t tag) { return op(OpKind::write, kRow, tag); }
Op add_one() { return op(OpKind::add, 0, 0, 1); }
Op await_one() { return op(OpKind::await_counter, 0, 0, 1, 31); }

/// A copy of the row into the second CTA's stage.
Program load_row(Program before) {
  before.push_back(op(OpKind::arrive_expecting, kBarrier1, 0, 1));
  before.push_back(op(OpKind::load_read, kRow, kOne));
  before.push_back(op(OpKind::load_write, kStage1, kOne, 0, kBarrier1));
  before.push_back(op(OpKind::await_barrier, kBarrier1, 0, 1));
  return before;
}

/// The first CTA's stage, filled, in bulk to the row.
Program bulk_store_row(Program after) {
  Program steps = {op(OpKind::write, kStage0, kOne, 0, 1), op(OpKind::fence_shared),
                   op(OpKind::store, kStage0, kOne, 0, kRow), op(OpKind::commit)};
  steps.insert(steps.end(), after.begin(), after.end());
  return steps;
}

TEST(MemoryModel, ACounterPublishes) {
  EXPECT_EQ(run({store_row(kOne), add_one()}, {await_one(), op(OpKind::read, kRow, kOne)}), "");
  EXPECT_TRUE(
      says(run({store_row(kOne), add_one()}, {op(OpKind::read, kRow, kOne)}), "before its write"));
  EXPECT_TRUE(says(run({add_one(), store_row(kOne)}, {await_one(), op(OpKind::read, kRow, kOne)}),
                   "before its write"));
  EXPECT_TRUE(says(run({store_row(kOne)}, {await_one()}), "nobody can go on"));
}

TEST(MemoryModel, ACopyOfWhatOrdinaryStoresWroteNeedsBothFences) {
  const Op fence = op(OpKind::fence);
  EXPECT_EQ(run({store_row(kOne), fence, add_one()}, load_row({await_one(), fence})), "");
  EXPECT_TRUE(says(run({store_row(kOne), add_one()}, load_row({await_one(), fence})),
                   "published it without a proxy fence"));
  EXPECT_TRUE(says(run({store_row(kOne), add_one(), fence}, load_row({await_one(), fence})),
                   "published it without a proxy fence"));
  EXPECT_TRUE(says(run({store_row(kOne), fence, add_one()}, load_row({await_one()})),
                   "without a proxy fence since the write"));
  EXPECT_TRUE(says(run({store_row(kOne), fence, add_one()}, load_row({fence, await_one()})),
                   "without a proxy fence since the write"));
}

TEST(MemoryModel, WhereReadersAloneFenceTheyMust) {
  const Op fence = op(OpKind::fence);
  const Program writer = {store_row(kOne), add_one()};
  EXPECT_EQ(run(writer, load_row({await_one(), fence}), Fences::reader), "");
  EXPECT_TRUE(says(run(writer, load_row({fence, await_one()}), Fences::reader),
                   "without a proxy fence since the write"));
  EXPECT_TRUE(says(run(writer, load_row({fence}), Fences::reader), "before its write"));
}

/// A buffer of shared memory: loaded, read by ordinary loads, loaded again.
TEST(MemoryModel, ABufferThatOrdinaryLoadsReadNeedsAFenceBeforeItIsFilledAgain) {
  const Op fence = op(OpKind::fence);
  const Op read = op(OpKind::read, kStage1, kOne);
  const auto refilled_after = [&](Program between) {
    Program steps = load_row({await_one(), fence});
    steps.insert(steps.end(), between.begin(), between.end());
    for (const Op& again : load_row({})) steps.push_back(again);
    steps.back().amount = 2;
    return run({store_row(kOne), fence, add_one()}, steps);
  };
  EXPECT_EQ(refilled_after({read, op(OpKind::fence_shared)}), "");
  EXPECT_TRUE(says(refilled_after({read}), "overwritten by a copy without a proxy fence"));
  EXPECT_TRUE(says(refilled_after({op(OpKind::fence_shared), read}),
                   "overwritten by a copy without a proxy fence"));
}

/// What is still being taken from is not read as if it were final.
TEST(MemoryModel, ACounterIsFinalOnceItsKernelHasEnded) {
  EXPECT_EQ(run({op(OpKind::take, 0)}, {}), "");
  EXPECT_TRUE(
      says(run({op(OpKind::take, 0)}, {op(OpKind::read_counter, 0)}), "while it may still change"));
}

TEST(MemoryModel, ABulkStoreIsThereAfterTheFullWait) {
  const Op fence = op(OpKind::fence);
  const Op complete = op(OpKind::wait_complete);
  EXPECT_EQ(run(bulk_store_row({complete, add_one()}), load_row({await_one(), fence})), "");
  EXPECT_EQ(run(bulk_store_row({complete, add_one()}), {await_one(), op(OpKind::read, kRow, kOne)}),
            "");
  EXPECT_TRUE(says(run(bulk_store_row({op(OpKind::wait_read), add_one(), complete}),
                       load_row({await_one(), fence})),
                   "before its write"));
  EXPECT_TRUE(says(run(bulk_store_row({op(OpKind::wait_complete, 0, 0, 1), add_one(), complete}),
                       load_row({await_one(), fence})),
                   "before its write"));
  EXPECT_TRUE(says(run(bulk_store_row({complete, add_one()}), load_row({await_one()})),
                   "without a proxy fence since the write"));
  EXPECT_TRUE(says(run(bulk_store_row({op(OpKind::wait_read)}), {}), "before its bulk stores"));
}

TEST(MemoryModel, ASourceMayBeOverwrittenOnceItIsRead) {
  const Op overwrite = op(OpKind::write, kStage0, kTwo, 0, 1);
  const Op complete = op(OpKind::wait_complete);
  EXPECT_EQ(run(bulk_store_row({op(OpKind::wait_read), overwrite, complete}), {}), "");
  EXPECT_TRUE(says(run(bulk_store_row({overwrite, complete}), {}), "may still read it"));
}

TEST(MemoryModel, WhatIsReadMayNotBeOverwritten) {
  EXPECT_TRUE(says(run({store_row(kOne), add_one(), store_row(kTwo)},
                       {await_one(), op(OpKind::read, kRow, kTwo)}),
                   "before its write"));
  EXPECT_TRUE(says(run({store_row(kOne), op(OpKind::read, kRow, kOne)}, {store_row(kTwo)}),
                   "may still be under way"));
  EXPECT_TRUE(says(run({store_row(kOne), store_row(kOne)}, {}), "written twice"));
  EXPECT_TRUE(says(run({store_row(kTwo), add_one()}, {await_one(), op(OpKind::read, kRow, kOne)}),
                   "something else"));
}

TEST(MemoryModel, AParityIsRightOnlyForWhoSeesEveryPhase) {
  const Op arrive = op(OpKind::arrive, kBarrier0);
  EXPECT_EQ(run({arrive, op(OpKind::await_barrier, kBarrier0, 0, 1)}, {}), "");
  EXPECT_TRUE(says(run({arrive, arrive, arrive, op(OpKind::await_barrier, kBarrier0, 0, 1)}, {}),
                   "ends in phase 3"));
  EXPECT_TRUE(says(run({op(OpKind::await_barrier, kBarrier0, 0, 2)}, {}), "ends in phase 0"));
}

}  // namespace
}  // namespace megamoe::checker
