// The router of one block, as a backend runs it.
#pragma once

#include <cstdint>
#include <span>

#include "megamoe/bf16.h"
#include "megamoe/router.h"
#include "train/sharding.h"

namespace megamoe::trainer {

/// Pointers are to the backend's memory; `shards` are places among this rank's tokens, one after
/// the other from token 0, and those of a backward are those of the forward before it.
///
/// Shapes: T tokens of this rank, H hidden, E experts, K slots, S shards of this rank.
class BlockRouter {
 public:
  BlockRouter() = default;
  BlockRouter(const BlockRouter&) = delete;
  BlockRouter& operator=(const BlockRouter&) = delete;
  virtual ~BlockRouter() = default;

  struct Input {
    const bf16* x_TH;
    const float* weight_EH;
  };
  struct Routing {
    std::int32_t* expert_ids_TK;
    float* weights_TK;
  };
  /// Routes the tokens, and writes how: `load` is laid out as RouterLoad::values(), [2E + 1].
  virtual void forward(std::span<const Share> shards, const Input& input, const Routing& routing,
                       double* load) = 0;

  struct Gradients {
    float* d_x_TH;                         ///< added to
    std::span<float* const> d_weight_SEH;  ///< a tensor a shard, each added to
  };
  /// The gradient of the last forward through its weights and through the auxiliary loss over all
  /// tokens of `global_load`.
  virtual void backward(std::span<const Share> shards, const Input& input,
                        const float* d_weights_TK, const RouterLoad& global_load,
                        const Gradients& gradients) = 0;

  [[nodiscard]] virtual double aux_loss(const RouterLoad& global_load) const = 0;
  virtual void update_selection_bias(const RouterLoad& global_load, float rate) = 0;
  /// [E], in the backend's memory; part of what a checkpoint keeps.
  [[nodiscard]] virtual float* selection_bias() = 0;

  /// Waits for the calls and throws what they have found.
  virtual void check() = 0;
};

}  // namespace megamoe::trainer
