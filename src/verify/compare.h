// The comparator: does a tensor agree with the oracle's, as a whole and slice by slice?
//
// Errors are relative norm errors, |actual - reference| / norm, with norm = |reference| unless a
// tensor brings a scale of its own. What is allowed is derived, never tuned:
//   max(2 x |baseline - reference|, c * (K/16) * 2^-24 * norm, one bf16 step of the largest
//   element)
// - The baseline is the oracle with the roundings of the contract: same precision, exact sums.
//   Twice its error is FlashAttention's rule. A slice may also use twice the relative error of the
//   whole tensor's baseline: in a slice of few elements the baseline's own error is small by
//   chance.
// - The second term covers sums of K fp32 products: about K/16 additions of a tensor core's partial
//   sums, each off by up to c half-ulps, because tensor cores truncate where a CPU rounds.
// - The third term is the floor for tiny tensors. A backend whose fp32 sum lies on the other side
// of
//   a rounding boundary than the exact sum stores the neighbouring bf16 number: that is right, and
//   a baseline of a few elements has not enough roundings to average over. It is at most 2^-7 of
//   one element and about 2^-7 * 3 / sqrt(n) of n, so that it matters only below some 100 elements
//   a slice. A tensor that is not itself rounded brings the step of what was rounded before it.
// A slice whose norm is 0 must be exactly 0, and nothing that is not finite passes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

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
  /// The smallest allowance of each slice, absolute; empty: one bf16 step of its largest element.
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
