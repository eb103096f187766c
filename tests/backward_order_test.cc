// What leaves a rank in the backward pass waits for no weight gradient.
#include "schedule/backward_order.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace megamoe::schedule {
namespace {

using enum BackwardLaunch;
using Steps = std::vector<BackwardStep>;

/// Those of a call, in order.
Steps steps_of(bool is_beside_dx) {
  Steps steps;
  for (const BackwardStep& step : kGradientsBesideRows) {
    if (takes_place(step.launch, is_beside_dx)) steps.push_back(step);
  }
  return steps;
}

std::ptrdiff_t place_of(const Steps& steps, BackwardLaunch launch) {
  const auto place = std::ranges::find(steps, launch, &BackwardStep::launch);
  EXPECT_NE(place, steps.end()) << static_cast<int>(launch);
  return place - steps.begin();
}

Steps with_swapped(Steps steps, BackwardLaunch a, BackwardLaunch b) {
  std::swap(steps[place_of(steps, a)], steps[place_of(steps, b)]);
  return steps;
}

TEST(BackwardOrder, RowsDoNotWaitForGradients) {
  EXPECT_FALSE(rows_wait_for_gradients(steps_of(false)));
  EXPECT_FALSE(rows_wait_for_gradients(steps_of(true)));
}

TEST(BackwardOrder, WhatLeavesBehindGradientsWaitsForThem) {
  for (const bool is_beside_dx : {false, true}) {
    const Steps steps = steps_of(is_beside_dx);
    for (const BackwardLaunch launch : {dx_and_push, push_dweights, announce}) {
      EXPECT_TRUE(rows_wait_for_gradients(with_swapped(steps, launch, gradients_behind_dx)))
          << static_cast<int>(launch);
    }
  }
}

TEST(BackwardOrder, AJoinAForkAndAnotherStreamPassTheWaitOn) {
  const Steps steps = steps_of(true);
  EXPECT_TRUE(rows_wait_for_gradients(with_swapped(steps, push_dweights, join)));
  EXPECT_TRUE(rows_wait_for_gradients(with_swapped(steps, announce, join)));
  Steps announces_beside = steps;
  announces_beside[place_of(steps, announce)].stream = LaunchStream::beside;
  EXPECT_TRUE(rows_wait_for_gradients(announces_beside));
  const LaunchStream beside = LaunchStream::beside;
  EXPECT_TRUE(rows_wait_for_gradients(Steps{{gradients_behind_dx}, {fork}, {dx_and_push, beside}}));
  EXPECT_FALSE(
      rows_wait_for_gradients(Steps{{fork}, {gradients_behind_dx}, {dx_and_push, beside}}));
}

/// The gradients beside dx do not follow it, but find its CTAs on the SMs.
TEST(BackwardOrder, DxIsEnqueuedBetweenTheForkAndTheGradientsBesideIt) {
  const Steps steps = steps_of(true);
  EXPECT_LT(place_of(steps, fork), place_of(steps, dx_and_push));
  EXPECT_LT(place_of(steps, dx_and_push), place_of(steps, gradients_beside_dx));
}

/// meet(results_sent) tells peers that nobody pulls their x any more, and who reduces what is left
/// comes last.
TEST(BackwardOrder, ResultsAreMetBehindEverythingElse) {
  for (const bool is_beside_dx : {false, true}) {
    const Steps steps = steps_of(is_beside_dx);
    const auto size = static_cast<std::ptrdiff_t>(steps.size());
    EXPECT_EQ(place_of(steps, meet_results), size - 2);
    EXPECT_EQ(place_of(steps, reduce_rest), size - 1);
    if (is_beside_dx) {
      EXPECT_EQ(place_of(steps, join), size - 3);
    }
  }
}

}  // namespace
}  // namespace megamoe::schedule
