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
  /// max over i of |p_i| * (one bf16 step of a_i): what one rounding of a to the other neighbour
  /// does to dweights, which is not itself rounded.
  std::vector<double> dweights_step_TK;
};

/// Forward and backward of the layer. Uses all cores, one expert a thread. An expert id outside
/// [-1, E) or a tensor of the wrong size is a programming error and throws std::logic_error.
OracleResult evaluate(const OracleInput& input, Rounding rounding, GradientStorage storage);

/// The nearest bf16, ties to even, by arithmetic on the value (subnormals of bf16 are not treated).
double round_to_bf16(double value);

/// The distance between neighbouring bf16 numbers around `value`; 0 for 0.
double bf16_step(double value);

}  // namespace megamoe::verify
