// Backward calls of two ranks, one of which comes no further than to where its rows have left.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <utility>

#include "cuda/runtime.h"
#include "gpu/at_launch.h"
#include "gpu/beside_dx.h"

namespace megamoe::verify {

/// Where weight gradients follow dx, and where they begin beside it: their first launch, or their
/// second, is what comes next once a rank has announced its dx (schedule/backward_order.h).
struct BehindRows {
  Problem problem;
  RunOptions options;
  int first_launch_behind;
};

inline BehindRows gradients_behind_rows() {
  return {make_problem(spec_with_tokens({40, 21})), {}, 1};
}
inline BehindRows gradients_beside_rows() {
  return {make_problem(spec_beside_dx(2)), options_beside_dx(), 2};
}

/// Once this rank's rows have arrived at its peers, and are announced: `action` on its thread,
/// within the backward call that it makes in this scope.
class OnceRowsAreSent {
 public:
  OnceRowsAreSent(const BehindRows& call, std::function<void()> action)
      : at_launch_("weight_gradients_beside_rows", call.first_launch_behind,
                   [action = std::move(action)](cudaStream_t stream) {
                     cuda::check(cudaStreamSynchronize(stream), "rows that leave");
                     action();
                   }) {}
  [[nodiscard]] bool has_come() const { return at_launch_.has_come(); }

 private:
  AtLaunch at_launch_;
};

}  // namespace megamoe::verify
