// The router: which experts a token goes to, with what weights, and how that is trained.
//
// Shapes: T tokens on this rank (may be 0), H hidden, E experts of all ranks, K slots a token,
// G expert groups.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "megamoe/tensor.h"

namespace megamoe {

/// How logits become scores. softmax: over the experts of a token. sigmoid: each expert alone.
enum class ScoreFunction : std::uint8_t { softmax, sigmoid };

/// What happens to the scores of a token's slots before the scale.
enum class WeightNorm : std::uint8_t {
  none,        ///< the score itself
  sum_to_one,  ///< divided by their sum over the token's non-empty slots (sigmoid: sum + 1e-20)
};

/// Whether a gradient replaces what its buffer holds or is added to it (once, after the whole sum).
enum class GradWrite : std::uint8_t { store, accumulate };

struct RouterConfig {
  std::int64_t num_experts = 0;  ///< E, at least 1
  std::int64_t top_k = 1;        ///< K of selected ids; forced ids bring their own K
  ScoreFunction score_function = ScoreFunction::softmax;
  WeightNorm weight_norm = WeightNorm::none;
  float scale = 1.0F;  ///< every weight is multiplied by it, after normalisation; > 0

  /// Group limit (DeepSeek-V3, arXiv:2412.19437): experts lie in num_groups groups of consecutive
  /// ids, a group's score is the sum of its two highest biased scores, and only the top_groups best
  /// groups (ties to the lower group) are eligible. num_groups = 1 means no limit.
  std::int64_t num_groups = 1;
  std::int64_t top_groups = 1;

  float aux_loss_alpha = 0.0F;  ///< coefficient of the auxiliary loss, >= 0; 0 switches it off

  bool operator==(const RouterConfig&) const = default;
};

/// Load of the experts, as plain sums over tokens: the loads of ranks, or of micro-batches, add up.
/// All numbers lie in one fp64 buffer, so that one sum all-reduce of values() makes a load global;
/// counts stay exact below 2^53.
class RouterLoad {
 public:
  RouterLoad() = default;
  /// Zeros. Throws invalid_argument if num_experts < 1.
  explicit RouterLoad(std::int64_t num_experts);

  [[nodiscard]] std::int64_t num_experts() const { return num_experts_; }
  /// Slots routed to the expert.
  [[nodiscard]] std::int64_t count(std::int64_t expert) const;
  /// Sum over tokens of the expert's score (sigmoid: of its share in the token's scores).
  [[nodiscard]] double score_sum(std::int64_t expert) const;
  [[nodiscard]] std::int64_t num_tokens() const;
  /// Non-empty slots: the sum of all counts.
  [[nodiscard]] std::int64_t num_slots() const;
  /// Highest count over the mean count; 1 is perfect balance, 0 means no slots.
  [[nodiscard]] double max_over_mean() const;

  void clear();
  /// Throws invalid_argument if the numbers of experts differ.
  RouterLoad& operator+=(const RouterLoad& other);

  /// [2E + 1]: counts, score sums, number of tokens. Summing it over ranks gives the global load.
  [[nodiscard]] std::span<double> values() { return values_; }
  [[nodiscard]] std::span<const double> values() const { return values_; }

 private:
  std::int64_t num_experts_ = 0;
  std::vector<double> values_;
};

/// Logits come either from `x` and `router_weight` or from `logits`; giving both or neither is
/// refused. Inner strides must be 1; rows may be further apart than their length.
struct RouterInputs {
  ConstTensorView x;              ///< [T, H] bf16
  ConstTensorView router_weight;  ///< [E, H] fp32 or bf16
  ConstTensorView logits;         ///< [T, E] fp32 or bf16 (converted), finite
  /// Optional [E] fp32, finite: added to the scores for selection, never in the weights.
  ConstTensorView selection_bias;
  /// Optional [T, K] int32: used in place of selection, e.g. the ids of an earlier forward. -1 is
  /// an empty slot (weight exactly 0, no gradient); ids of one token may repeat, and K may exceed
  /// E: every slot counts.
  ConstTensorView forced_ids;
};

/// Both are required. Nothing is written when forward throws.
struct RouterOutputs {
  TensorView expert_ids;  ///< [T, K] int32, a token's slots by falling biased score
  TensorView weights;     ///< [T, K] fp32
};

/// What a forward keeps for its backward. Several may be in flight; a context is reused by passing
/// it to forward again, and its memory grows only when a call is larger than all before it.
class RouterContext {
 public:
  /// False before the first forward and after a forward that threw.
  [[nodiscard]] bool ready() const { return ready_; }
  [[nodiscard]] std::int64_t num_tokens() const { return num_tokens_; }
  /// That of the router that filled it; a backward needs a router with an equal one.
  [[nodiscard]] const RouterConfig& config() const { return config_; }
  /// [T, E] fp32, valid until the context is used again.
  [[nodiscard]] ConstTensorView scores() const;
  /// [T, K] int32: pass it as forced_ids to repeat a routing bit for bit.
  [[nodiscard]] ConstTensorView expert_ids() const;

 private:
  friend class Router;
  bool ready_ = false;
  std::int64_t num_tokens_ = 0;
  std::int64_t num_slots_ = 0;
  RouterConfig config_;
  std::vector<float> scores_TE_;
  std::vector<std::int32_t> expert_ids_TK_;
  std::vector<float> shares_TK_;  // weights before the scale
};

struct RouterBackwardInputs {
  ConstTensorView d_weights;      ///< [T, K] fp32; the values of empty slots are not read
  ConstTensorView x;              ///< [T, H] bf16, needed for d_router_weight
  ConstTensorView router_weight;  ///< [E, H] fp32 or bf16, needed for d_x
  /// The load summed over all ranks of the batch, this rank included. Required when aux_loss_alpha
  /// is not 0, ignored otherwise.
  const RouterLoad* global_load = nullptr;
  float d_aux_loss = 1.0F;  ///< derivative of the trained loss by aux_loss
};

/// Each is optional.
struct RouterBackwardOutputs {
  TensorView d_logits;         ///< [T, E] fp32, stored
  TensorView d_x;              ///< [T, H] fp32
  TensorView d_router_weight;  ///< [E, H] fp32, the plain sum over this rank's tokens
  GradWrite d_x_write = GradWrite::store;
  GradWrite d_router_weight_write = GradWrite::store;
};

/// Routes tokens on the CPU (CudaRouter in cuda_router.h: on a device). Deterministic: a token's
/// results depend on nothing but its own row, and sums run in a fixed order (logits over H, d_x
/// over E, d_router_weight over T; each one fp32 chain of fused multiply-adds).
///
/// A Router owns scratch memory that grows to the largest call; use it from one thread at a time.
/// Every method throws megamoe::Error with invalid_argument and the argument's name unless it says
/// otherwise, and out_of_memory if a buffer cannot be had.
class Router {
 public:
  /// Refuses num_experts or top_k out of range, groups that do not divide the experts, top_groups
  /// out of range or too few for top_k, and a scale or alpha that is not finite or has a wrong
  /// sign.
  explicit Router(const RouterConfig& config);

  [[nodiscard]] const RouterConfig& config() const { return config_; }

  /// Scores, selection (unless ids are forced; ties go to the lower id) and weights. A logit that
  /// is NaN or infinite is refused by token and expert; a forced id outside [-1, E) is refused
  /// with expert_id_out_of_range.
  void forward(const RouterInputs& inputs, const RouterOutputs& outputs, RouterContext& context);

  /// Adds the tokens of a forward to `load`, which must have E experts.
  void add_load(const RouterContext& context, RouterLoad& load) const;

  /// `alpha * E * sum_j f_j P_j` with f_j the share of the non-empty slots that went to expert j
  /// and P_j the mean over tokens of its score (sigmoid: of its share in the token's scores), as in
  /// Switch Transformer, arXiv:2101.03961. It is alpha when the load is balanced, and 0 without
  /// tokens. `global_load` covers the tokens of all ranks, so every rank gets the same value.
  [[nodiscard]] double aux_loss(const RouterLoad& global_load) const;

  /// Gradients of the forward that filled `context`, through weights and, with f_j held constant,
  /// through the P_j of the auxiliary loss. The selection itself has no gradient.
  void backward(const RouterContext& context, const RouterBackwardInputs& inputs,
                const RouterBackwardOutputs& outputs);

 private:
  void load_logits(const RouterInputs& inputs, std::int64_t num_tokens, float* logits_TE);
  void route_tokens(const RouterInputs& inputs, const RouterOutputs& outputs,
                    RouterContext& context);
  void logit_gradients(const RouterContext& context, const RouterBackwardInputs& inputs,
                       const TensorView& d_logits);

  RouterConfig config_;
  std::vector<float> router_weight_HE_;  // transposed, fp32
  std::vector<float> logits_E_;
  std::vector<float> choice_E_;
  std::vector<float> group_scores_G_;
  std::vector<float> aux_slopes_E_;
  std::vector<float> d_logits_TE_;
  std::vector<float> row_H_;
};

/// `bias_j += rate * sign(mean load - load_j)`, and nothing where they are equal: balancing without
/// an auxiliary loss, as in DeepSeek-V3, arXiv:2412.19437. `selection_bias` is [E] fp32; `rate` is
/// finite and >= 0; `global_load` covers the tokens of all ranks, so that all ranks keep equal
/// biases. Throws invalid_argument.
void update_selection_bias(const RouterLoad& global_load, float rate, TensorView selection_bias);

}  // namespace megamoe
