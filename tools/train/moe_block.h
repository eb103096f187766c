// One block of the model: x += MoE(RMSNorm(x)), experts spread over the ranks.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "megamoe/layer.h"
#include "megamoe/router.h"
#include "train/gradient_shards.h"
#include "train/options.h"
#include "train/parameters.h"
#include "train/sharding.h"

namespace megamoe::trainer {

/// Shapes: T tokens of this rank, H hidden, I intermediate, E experts, e = E / R of this rank, K
/// slots a token.
class MoeBlock {
 public:
  /// Collective. Adds its parameters to the two groups; all of them must outlive the block.
  MoeBlock(const std::string& name, const ModelOptions& options, const LayerConfig& layer_config,
           Communicator& communicator, Workspace& workspace, ParameterGroup& shared,
           ParameterGroup& experts);

  /// Adds the block's output to x. The tokens are those of `shards`, which follow one another.
  /// Collective, like everything that runs the layer.
  void forward(std::span<const Share> shards, float* x_TH);

  /// How this rank's tokens of the last forward were routed; the trainer sums it over the ranks.
  [[nodiscard]] const RouterLoad& load() const { return load_; }

  /// Turns the gradient of the block's output into that of its input, and writes the gradients of
  /// its parameters: those of the experts, over the tokens of all ranks, into their group; those of
  /// the shared ones into `gradients`, where they are added. The auxiliary loss, over all tokens of
  /// `global_load`, takes part. `shards` are those of the forward.
  void backward(std::span<const Share> shards, float* dx_TH, const RouterLoad& global_load,
                GradientShards& gradients);

  [[nodiscard]] double aux_loss(const RouterLoad& global_load) const {
    return router_.aux_loss(global_load);
  }
  void update_selection_bias(const RouterLoad& global_load, double rate);
  /// [E]; part of what a checkpoint keeps.
  [[nodiscard]] std::span<float> selection_bias() { return selection_bias_E_; }

  /// The places of its parameters, for initialisation.
  struct Parameters {
    ParameterSlice norm;           ///< [H], shared
    ParameterSlice router_weight;  ///< [E, H], shared
    ParameterSlice gate;           ///< [e, I, H], experts
    ParameterSlice up;             ///< [e, I, H], experts
    ParameterSlice down;           ///< [e, H, I], experts
  };
  [[nodiscard]] const Parameters& parameters() const { return parameters_; }
  [[nodiscard]] std::int64_t intermediate_dim() const { return intermediate_dim_; }

 private:
  void route(const Share& shard, RouterContext& context);
  void route_backward(std::int64_t shard_index, const Share& shard, const RouterLoad& global_load,
                      GradientShards& gradients);
  [[nodiscard]] ExpertWeights expert_weights() const;
  [[nodiscard]] ExpertGradients expert_gradients();
  [[nodiscard]] ConstTensorView router_weight();

  std::int64_t hidden_dim_;
  std::int64_t intermediate_dim_;
  std::int64_t num_experts_;
  std::int64_t num_local_experts_;
  std::int64_t top_k_;
  ParameterGroup& shared_;
  ParameterGroup& experts_;
  Parameters parameters_;
  Router router_;
  MoeLayer layer_;

  // What the last forward leaves for its backward.
  std::vector<float> x_TH_;
  std::vector<float> inverse_rms_T_;
  std::vector<bf16> normed_TH_;
  std::vector<std::int32_t> expert_ids_TK_;
  std::vector<float> weights_TK_;
  std::vector<RouterContext> router_contexts_;  // a shard
  CallContext layer_context_;
  RouterLoad load_;

  std::vector<float> selection_bias_E_;

  // Buffers within a call.
  std::vector<float> wide_TH_;
  std::vector<bf16> y_TH_;
  std::vector<bf16> dy_TH_;
  std::vector<bf16> d_normed_TH_;
  std::vector<float> d_weights_TK_;
};

}  // namespace megamoe::trainer
