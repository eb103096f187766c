// A byte-level language model: the next byte from the last n.
//
//   x = embedded context -> L blocks of x += MoE(RMSNorm(x)) -> RMSNorm -> logits = embedding x
//
// The output head and the input share one embedding. Experts are spread over the ranks; everything
// else is replicated, and each rank has its own tokens of the global batch.
//
// Shapes: T tokens of this rank, n context, H hidden, V = 256 byte values, L blocks.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "megamoe/layer.h"
#include "train/backend.h"
#include "train/gradient_shards.h"
#include "train/moe_block.h"
#include "train/options.h"
#include "train/parameters.h"
#include "train/sharding.h"

namespace megamoe::trainer {

class Model {
 public:
  /// Collective. Every rank draws the same shared parameters, and its own experts as a run with any
  /// other number of ranks would. The backend must outlive the model.
  Model(const TrainOptions& options, TrainBackend& backend);

  /// Runs `contexts` [T, n], this rank's share of a batch of `batch` samples (items_of_rank), and
  /// leaves the logits. `batch` is at most that of the options. Collective, and so is backward().
  void forward(std::int64_t batch, std::span<const std::uint8_t> contexts_Tn);
  /// [T, V] of the last forward, on the host; until the next call.
  [[nodiscard]] std::span<const float> logits();
  /// Mean over the batch of -log p(target) in nats, on every rank; sums over the ranks how the
  /// tokens were routed as well. Collective.
  double loss(std::span<const std::uint8_t> targets_T);
  /// The same, and leaves the gradient for backward() in place of the logits.
  double loss_for_backward(std::span<const std::uint8_t> targets_T);

  /// Sum of the blocks' auxiliary losses. This and the next: of the last loss.
  [[nodiscard]] double aux_loss() const;
  /// Of the block that is balanced worst.
  [[nodiscard]] double load_max_over_mean() const;

  /// Overwrites the gradients of both groups; both are sums over the tokens of all ranks. Needs
  /// loss_for_backward() first.
  void backward();

  void update_selection_biases(double rate);
  /// To be called whenever the values of parameters have changed.
  void parameters_changed() { experts_.round_values(backend_.operations()); }

  [[nodiscard]] ParameterGroup& shared() { return shared_; }
  [[nodiscard]] ParameterGroup& experts() { return experts_; }
  [[nodiscard]] std::vector<MoeBlock>& blocks() { return blocks_; }
  [[nodiscard]] TrainBackend& backend() { return backend_; }
  [[nodiscard]] std::int64_t max_tokens() const { return max_tokens_; }
  [[nodiscard]] std::int64_t context() const { return context_; }

 private:
  void initialize(std::uint64_t seed);
  double sum_over_ranks_and_shards();
  void head_backward();
  void check();

  TrainBackend& backend_;
  std::int64_t context_;
  std::int64_t hidden_dim_;
  std::int64_t max_tokens_;

  ParameterGroup shared_;
  ParameterGroup experts_;
  ParameterSlice embedding_;   // [V, H]
  ParameterSlice position_;    // [n, H]
  ParameterSlice final_norm_;  // [H]

  Workspace workspace_;  // one for all blocks
  std::vector<MoeBlock> blocks_;
  std::vector<RouterLoad> global_loads_;
  std::unique_ptr<GradientShards> gradient_shards_;

  std::int64_t batch_ = 0;
  std::vector<Share> shards_;  // of this rank, places among its tokens
  std::int64_t num_tokens_ = 0;
  Buffer<std::uint8_t> contexts_Tn_;
  Buffer<std::uint8_t> targets_T_;
  Buffer<float> x_TH_;
  Buffer<float> normed_TH_;
  Buffer<float> inverse_rms_T_;
  Buffer<float> logits_TV_;
  Buffer<float> d_normed_TH_;
  Buffer<float> dx_TH_;
  // All that is counted over tokens: a place for each shard's loss, which one rank fills, and the
  // blocks' loads.
  Buffer<double> sums_;
  std::vector<double> host_sums_;
  std::vector<double> sums_scratch_;
  std::vector<float> host_logits_;
};

}  // namespace megamoe::trainer
