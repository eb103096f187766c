// One block of the model: x += MoE(RMSNorm(x)), experts spread over the ranks.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "megamoe/layer.h"
#include "megamoe/router.h"
#include "train/backend.h"
#include "train/gradient_shards.h"
#include "train/options.h"
#include "train/parameters.h"
#include "train/sharding.h"

namespace megamoe::trainer {

/// Shapes: T tokens of this rank, H hidden, I intermediate, E experts, e = E / R of this rank, K
/// slots a token.
class MoeBlock {
 public:
  /// Collective. Adds its parameters to the two groups; all of these must outlive the block.
  MoeBlock(const std::string& name, const ModelOptions& options, const LayerConfig& layer_config,
           TrainBackend& backend, Workspace& workspace, ParameterGroup& shared,
           ParameterGroup& experts);

  /// Adds the block's output to x, and writes how its tokens were routed to `load`, [2E + 1] as
  /// RouterLoad::values(), for the trainer to sum over the ranks. The tokens are those of `shards`,
  /// which follow one another. Collective, like everything that runs the layer. Pointers are to the
  /// backend's memory.
  void forward(std::span<const Share> shards, float* x_TH, double* load);

  /// Turns the gradient of the block's output into that of its input, and writes the gradients of
  /// its parameters: those of the experts, over the tokens of all ranks, into their group; those of
  /// the shared ones into `gradients`, where they are added. The auxiliary loss, over all tokens of
  /// `global_load`, takes part. `shards` are those of the forward.
  void backward(std::span<const Share> shards, float* dx_TH, const RouterLoad& global_load,
                GradientShards& gradients);

  /// Waits for the calls of layer and router, and throws what they have found. Collective.
  void check();

  [[nodiscard]] double aux_loss(const RouterLoad& global_load) const {
    return router_->aux_loss(global_load);
  }
  void update_selection_bias(const RouterLoad& global_load, double rate);
  /// [E], in the backend's memory; part of what a checkpoint keeps.
  [[nodiscard]] float* selection_bias() { return router_->selection_bias(); }
  [[nodiscard]] std::int64_t num_experts() const { return num_experts_; }

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
  [[nodiscard]] ExpertWeights expert_weights() const;
  [[nodiscard]] ExpertGradients expert_gradients();
  [[nodiscard]] BlockRouter::Input router_input();

  std::int64_t hidden_dim_;
  std::int64_t intermediate_dim_;
  std::int64_t num_experts_;
  std::int64_t num_local_experts_;
  std::int64_t top_k_;
  TrainBackend& backend_;
  ParameterGroup& shared_;
  ParameterGroup& experts_;
  Parameters parameters_;
  std::unique_ptr<BlockRouter> router_;
  MoeLayer layer_;

  // What the last forward leaves for its backward.
  Buffer<float> x_TH_;
  Buffer<float> inverse_rms_T_;
  Buffer<bf16> normed_TH_;
  Buffer<std::int32_t> expert_ids_TK_;
  Buffer<float> weights_TK_;
  CallContext layer_context_;

  // Buffers within a call.
  Buffer<float> wide_TH_;
  Buffer<bf16> y_TH_;
  Buffer<bf16> dy_TH_;
  Buffer<bf16> d_normed_TH_;
  Buffer<float> d_weights_TK_;
  std::vector<float*> d_router_weights_;  // a shard
};

}  // namespace megamoe::trainer
