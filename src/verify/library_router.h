// The library's router on a problem, rank by rank, and its judgement.
#pragma once

#include <memory>
#include <vector>

#include "megamoe/router.h"
#include "verify/compare.h"
#include "verify/problem.h"
#include "verify/run.h"

namespace megamoe::verify {

/// Routes each rank's tokens with the library's router: its own selection, or, where the pattern
/// forces ids, those of the problem.
class LibraryRouter {
 public:
  explicit LibraryRouter(const Problem& problem);

  /// The problem with the router's ids and weights in place of the oracle's.
  [[nodiscard]] const Problem& routed() const { return routed_; }

  /// The gradient of the router's weight, [E, H] fp32: the sum over ranks, given the layer's
  /// dweights of all ranks, [T, K] fp32.
  RawTensor weight_gradient(const RawTensor& dweights);

 private:
  Problem routed_;
  Router router_;
  std::vector<RouterContext> contexts_R_;
};

/// "expert_ids" and "weights" of a routed problem. The ids must be the problem's where they are
/// forced; otherwise no expert left out may have a higher score than one that was taken, but for
/// rounding: then the error is the largest excess, as a share of the highest possible score.
std::vector<Comparison> judge_routing(const Problem& problem, const Problem& routed);

}  // namespace megamoe::verify
