// The comparator: does a tensor agree with the oracle's, as a whole and slice by slice?
//
// Errors are relative norm errors, |actual - reference| / norm, with norm = |reference| unless a
// tensor brings a scale of its own. What is allowed is derived, never tuned:
//   max(2 x |baseline - reference|, k * rms of the roundings, 4 x the largest of their effects,
//       c * (K/16) * 2^-24 * norm)
// - The baseline is the oracle with the roundings of the contract: same precision, exact sums.
//   Twice its error is FlashAttention's rule. A slice may also use twice the relative error of the
//   whole tensor's baseline: in a slice of few elements the baseline's own error is small by
//   chance.
// - The two terms in the middle say by the roundings themselves what the baseline says where they
//   are many: each is off by up to half a step, with a third of its square as variance, whichever
//   side of a boundary a backend's fp32 sum lies on (rounding_effects.h). k is 2, or more for a
//   slice of few elements. A few uniform errors can add up to more than that: hence two whole steps
//   of the one that matters most. docs/numerics.md has the derivation.
// - The last term covers sums of K fp32 products: fp32_sum_error().
// Where effects are not known, one bf16 step of the largest element takes their place. A slice
// whose norm is 0, and behind which nothing is rounded, must be exactly 0; nothing that is not
// finite passes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "verify/oracle.h"

namespace megamoe::verify {

/// A tensor of any dtype as fp64 values, row-major.
struct HostTensor {
  std::vector<std::int64_t> shape;
  std::vector<double> values;
};

struct CompareOptions {
  /// What a slice is, for messages: "expert", "token", "slot". The tensor is cut into slices along
  /// its first `slice_dims` dimensions: 1 for the rows of [T, H] and the experts of [E, I, H], 2
  /// for the slots of [T, K].
  std::string slice_name = "token";
  int slice_dims = 1;
  /// Length K of the fp32 sum behind an element.
  std::int64_t reduction_length = 1;
  /// The scale of each slice in place of the reference's norm; empty: the reference's norm.
  std::vector<double> slice_norms = {};
  /// Of the roundings behind each slice; empty: not known.
  std::vector<RoundingEffect> slice_effects = {};
  /// The smallest allowance of each slice, absolute; empty: what the effects make it where they are
  /// known, else one bf16 step of its largest element.
  std::vector<double> slice_floors = {};
};

struct Comparison {
  std::string name;
  bool passed = false;
  double error = 0.0;    ///< of the whole tensor, relative
  double allowed = 0.0;  ///< for the whole tensor, relative
  /// The slice that uses most of its allowance, as "expert 3: 1.2e-3 of 2.0e-3"; empty if none.
  std::string worst_slice;
  std::string failure;  ///< why it did not pass; empty if it did
};

/// Never throws for what is wrong with `actual`: a missing tensor (no elements where the reference
/// has some), another shape, NaN and infinity are failures.
Comparison compare(const std::string& name, const HostTensor& actual, const HostTensor& reference,
                   const HostTensor& baseline, const CompareOptions& options);

}  // namespace megamoe::verify
