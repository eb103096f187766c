// Judges what a backend computed for a problem against the oracles, tensor by tensor.
#pragma once

#include <string>
#include <vector>

#include "verify/compare.h"
#include "verify/problem.h"
#include "verify/run.h"

namespace megamoe::verify {

/// y, dx, dgate (unless ungated), dup, ddown and dweights of `tensors`, all ranks concatenated.
/// Accumulated gradients are judged after `options.initial_gradient` is taken off: what an expert
/// without rows leaves is then exactly 0. With a `drouter`, the router's weight gradient [E, H] for
/// `tensors.dweights`, that one too: its baseline is the oracle's router behind the rounded layer.
std::vector<Comparison> judge_layer(const Problem& problem, const LayerTensors& tensors,
                                    const RunOptions& options, const RawTensor* drouter = nullptr);

bool all_passed(const std::vector<Comparison>& comparisons);

/// The failures, a line each; for messages of tests.
std::string failures(const std::vector<Comparison>& comparisons);

}  // namespace megamoe::verify
