// A step of training allocates nothing once the first steps have made what they need.
#include <gtest/gtest.h>

#include <array>

#include "count_allocations.h"
#include "train_fixture.h"

namespace megamoe::trainer {
namespace {

TEST(TrainAllocation, NoneAfterTheFirstSteps) {
  const TemporaryDirectory directory;
  TrainOptions options = tiny_options(directory);
  options.num_steps = 40;
  options.num_ranks = 2;
  std::array<std::int64_t, 41> allocations_before{};
  train(options, {.on_step =
                      [&](const StepRecord& record) {
                        allocations_before[record.step] = testing::num_allocations();
                      },
                  .on_end = {}});
  // Which rows meet on a rank changes from step to step, and buffers grow to the largest number.
  EXPECT_EQ(allocations_before[40] - allocations_before[20], 0);
  EXPECT_GT(allocations_before[1], 0);
}

}  // namespace
}  // namespace megamoe::trainer
