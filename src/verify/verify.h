// The whole check that `megamoe verify` and the tests make: route, run, judge.
#pragma once

#include <optional>
#include <vector>

#include "verify/judge.h"
#include "verify/problem.h"
#include "verify/run.h"

namespace megamoe::verify {

/// Routes with the library's router, runs forward and backward of the layer, then the backward of
/// the router; judges everything that came out against the oracles. With `perturbed`, the layer,
/// but no oracle, sees with_perturbed_weight(). A wrong routing is reported alone: nothing that
/// follows from it would mean anything.
std::vector<Comparison> verify_backend(const Problem& problem, const RunOptions& options,
                                       std::optional<ExpertWeight> perturbed = std::nullopt);

}  // namespace megamoe::verify
