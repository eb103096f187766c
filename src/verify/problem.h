// Reproducible inputs of a layer: unit-scale tokens, expert weights at 1/sqrt(fan in), a router and
// the routing it gives. All ranks' tokens are held concatenated in rank order, and all E experts.
//
// Every element is a function of (seed, tensor, index) alone: a problem with tokens {40, 24} has
// the tensors of the problem with tokens {64}, so that results at different R can be compared
// bitwise.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "megamoe/bf16.h"
#include "megamoe/config.h"
#include "verify/oracle.h"
#include "verify/router_oracle.h"

namespace megamoe::verify {

enum class RoutingPattern : std::uint8_t {
  uniform,     ///< top-k of a random router
  skewed,      ///< a selection bias that falls with the expert's id
  one_expert,  ///< every slot of every token names the last expert
  duplicates,  ///< the last slot of every second token repeats the first one
  holes,       ///< of four tokens one each lacks its first slot, its last slot, all slots, none
  ties,        ///< all logits equal: every token takes experts 0 ... K-1 with equal weights
};
const char* to_string(RoutingPattern pattern);

/// Whether the ids of the pattern are imposed on the router in place of its own selection.
constexpr bool forces_ids(RoutingPattern pattern) {
  return pattern == RoutingPattern::one_expert || pattern == RoutingPattern::duplicates ||
         pattern == RoutingPattern::holes;
}

struct ProblemSpec {
  std::vector<std::int64_t> tokens_per_rank = {64};  ///< one number a rank; may be 0
  std::int64_t hidden_dim = 64;
  std::int64_t intermediate_dim = 64;
  std::int32_t num_experts = 8;
  std::int32_t top_k = 2;
  std::uint64_t seed = 0;
  RoutingPattern routing = RoutingPattern::uniform;
  Activation activation;

  [[nodiscard]] int num_ranks() const { return static_cast<int>(tokens_per_rank.size()); }
  [[nodiscard]] std::int64_t num_tokens() const;  ///< of all ranks
  [[nodiscard]] std::int64_t max_tokens() const;  ///< of one rank
  /// Index of the rank's first token among all ranks' tokens.
  [[nodiscard]] std::int64_t first_token(int rank) const;
};

struct Problem {
  ProblemSpec spec;
  std::vector<bf16> x_TH;
  std::vector<bf16> dy_TH;
  std::vector<bf16> gate_EIH;  ///< empty for ungated activations
  std::vector<bf16> up_EIH;
  std::vector<bf16> down_EHI;
  std::vector<float> router_weight_EH;
  std::vector<float> selection_bias_E;  ///< empty unless the pattern needs one
  std::vector<std::int32_t> expert_ids_TK;
  std::vector<float> weights_TK;  ///< softmax scores; NaN in empty slots, where nobody may read
};

/// Throws std::invalid_argument for K > E where the pattern needs K different experts, and for
/// sizes that are not positive.
Problem make_problem(const ProblemSpec& spec);

enum class ExpertWeight : std::uint8_t { gate, up, down };

/// The problem with one element of a weight off by 1, of an expert that some token goes to. Throws
/// std::invalid_argument if there is no such expert, or no such weight.
Problem with_perturbed_weight(Problem problem, ExpertWeight weight);

OracleInput oracle_input(const Problem& problem);
RouterOracle router_oracle(const Problem& problem);

/// A standard normal number that depends on its arguments only.
double normal_at(std::uint64_t seed, std::uint64_t stream, std::uint64_t index);

std::vector<double> to_doubles(const std::vector<bf16>& values);
std::vector<double> to_doubles(const std::vector<float>& values);

}  // namespace megamoe::verify
