// The order in which a backward call with overlap is enqueued once it has dg, du and w a: used by
// the CUDA backend and by the checker's model of it.
//
// The rule: what leaves a rank never waits for a weight gradient. So on the way to a push or to an
// announcement, along its stream and over forks and joins, lies no launch of weight gradients.
#pragma once

#include <array>
#include <cstdint>
#include <span>

namespace megamoe::schedule {

enum class BackwardLaunch : std::uint8_t {
  fork,  ///< what is enqueued beside follows what the call's stream holds here
  dx_and_push,
  gradients_beside_dx,
  push_dweights,
  announce,
  gradients_behind_dx,  ///< those that are left
  join,                 ///< the call's stream goes on when what is beside it has ended
  meet_results,
  reduce_rest,
};

enum class LaunchStream : std::uint8_t { of_call, beside };

struct BackwardStep {
  BackwardLaunch launch;
  LaunchStream stream = LaunchStream::of_call;
};

/// dx is enqueued before the gradients beside it: where SMs are taken, they wait for dx, not dx for
/// them.
inline constexpr std::array kGradientsBesideRows = {
    BackwardStep{BackwardLaunch::fork},
    BackwardStep{BackwardLaunch::dx_and_push},
    BackwardStep{BackwardLaunch::gradients_beside_dx, LaunchStream::beside},
    BackwardStep{BackwardLaunch::push_dweights},
    BackwardStep{BackwardLaunch::announce},
    BackwardStep{BackwardLaunch::gradients_behind_dx},
    BackwardStep{BackwardLaunch::join},
    BackwardStep{BackwardLaunch::meet_results},
    BackwardStep{BackwardLaunch::reduce_rest},
};

/// Without gradients beside dx (beside_dx.h) there is no second stream.
constexpr bool takes_place(BackwardLaunch launch, bool is_beside_dx) {
  return is_beside_dx || (launch != BackwardLaunch::fork && launch != BackwardLaunch::join &&
                          launch != BackwardLaunch::gradients_beside_dx);
}

/// The rule above.
constexpr bool rows_wait_for_gradients(std::span<const BackwardStep> steps) {
  bool is_behind[] = {false, false};  // a launch of weight gradients, on each stream
  bool& of_call = is_behind[static_cast<int>(LaunchStream::of_call)];
  bool& beside = is_behind[static_cast<int>(LaunchStream::beside)];
  for (const BackwardStep& step : steps) {
    bool& own = is_behind[static_cast<int>(step.stream)];
    switch (step.launch) {
      case BackwardLaunch::fork:
        beside = of_call;
        break;
      case BackwardLaunch::join:
        of_call = of_call || beside;
        break;
      case BackwardLaunch::gradients_beside_dx:
      case BackwardLaunch::gradients_behind_dx:
        own = true;
        break;
      case BackwardLaunch::dx_and_push:
      case BackwardLaunch::push_dweights:
      case BackwardLaunch::announce:
        if (own) return true;
        break;
      default:
        break;
    }
  }
  return false;
}
static_assert(!rows_wait_for_gradients(kGradientsBesideRows));

}  // namespace megamoe::schedule
