// The layer once more, deliberately naive: fp64, plain loops over tokens, slots and experts, no
// plan, no ranks, own activation formulas. It shares no code with the library that it judges.
//
// Shapes: T tokens of all ranks, concatenated in rank order; H hidden, I intermediate, E experts,
// K slots. A suffix such as `x_TH` is the shape of a row-major tensor.
#pragma once

#include <cstdint>
#include <vector>

#include "megamoe/config.h"

namespace megamoe::verify {

/// Where the oracle rounds.
enum class Rounding : std::uint8_t {
  none,      ///< nowhere: the true value of the layer, to fp64
  contract,  ///< to bf16 at the points that bind every backend: the same-precision baseline
};

/// How the weight gradients are stored; matters to Rounding::contract only.
enum class GradientStorage : std::uint8_t { bf16, fp32 };

struct OracleInput {
  std::int64_t num_tokens = 0;
  std::int64_t hidden_dim = 0;
  std::int64_t intermediate_dim = 0;
  std::int64_t num_experts = 0;
  std::int64_t top_k = 0;
  Activation activation;
  std::vector<double> x_TH;
  std::vector<double> dy_TH;
  std::vector<std::int32_t> expert_ids_TK;  ///< -1 is an empty slot
  std::vector<double> weights_TK;           ///< of empty slots: not read
  std::vector<double> gate_EIH;             ///< empty for ungated activations
  std::vector<double> up_EIH;
  std::vector<double> down_EHI;
};

/// What roundings do to a slice, by half a step each: the norm of the change of the slice.
struct RoundingEffect {
  double squared = 0.0;  ///< summed over the roundings
  double largest = 0.0;  ///< of one of them

  void add(double effect) { add({effect * effect, effect}); }
  void add(const RoundingEffect& other) {
    squared += other.squared;
    largest = largest < other.largest ? other.largest : largest;
  }
};

/// For each slice of each tensor: the effect of the contract's roundings behind it, to first order.
/// A rounding is off by at most half a step, whichever side of a boundary a backend's fp32 sum lies
/// on; where that sum cancels, or fp32 loses an activation's tail, by that much more. 0 where
/// nothing is rounded.
struct RoundingEffects {
  std::vector<RoundingEffect> y_T;
  std::vector<RoundingEffect> dx_T;
  std::vector<RoundingEffect> dweights_TK;
  std::vector<RoundingEffect> dgate_E;
  std::vector<RoundingEffect> dup_E;
  std::vector<RoundingEffect> ddown_E;
};

struct OracleResult {
  std::vector<double> y_TH;
  std::vector<double> dx_TH;
  std::vector<double> dweights_TK;
  std::vector<double> dgate_EIH;  ///< empty for ungated activations
  std::vector<double> dup_EIH;
  std::vector<double> ddown_EHI;
  /// |dy_t| * |o_tk|: dweights is the inner product of the two vectors, which may cancel, so its
  /// error is judged against the product of their lengths. 0 for empty slots.
  std::vector<double> dweights_scale_TK;
  RoundingEffects effects;  ///< of Rounding::none; else empty
};

/// Forward and backward of the layer. Uses all cores, one expert a thread. An expert id outside
/// [-1, E) or a tensor of the wrong size is a programming error and throws std::logic_error.
OracleResult evaluate(const OracleInput& input, Rounding rounding, GradientStorage storage);

/// The nearest bf16, ties to even, by arithmetic on the value (subnormals of bf16 are not treated).
double round_to_bf16(double value);

/// The distance between neighbouring bf16 numbers around `value`; 0 for 0.
double bf16_step(double value);

/// What an fp32 sum of `length` products may be off by, relative to its size: about length/16
/// additions of a tensor core's partial sums, each off by up to four half-ulps, because tensor
/// cores truncate where a CPU rounds.
double fp32_sum_error(std::int64_t length);

}  // namespace megamoe::verify
