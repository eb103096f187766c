// What the model and its optimizer compute around the layer, as a backend does it: on the host
// (cpu/), or on a GPU with cuBLAS and small kernels (cuda/). dense_ops.h has the same formulas as
// plain loops.
//
// Shapes: T tokens of this rank, n bytes of context, H hidden, V = 256 byte values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "megamoe/bf16.h"
#include "train/dense_ops.h"
#include "train/sharding.h"

namespace megamoe::trainer {

/// A product's inner and outer sizes; the rows are tokens, and a caller says which.
struct ProductSize {
  std::int64_t columns;  ///< N
  std::int64_t depth;    ///< K
};

/// `num_parts` arrays of `part_count` floats, one after the other.
struct EqualParts {
  const float* values;
  std::int64_t part_count;
  std::int64_t num_parts;
};

/// The factors of an AdamW step, in the precision of the parameters.
struct AdamWFactors {
  float beta1;
  float beta2;
  float gradient_scale;
  float rate;          ///< over the bias correction of the first moment
  float v_correction;  ///< over the bias correction of the second moment
  float epsilon;
};

/// The tensors of an AdamW step.
struct AdamWState {
  std::int64_t count;
  const float* gradients;
  float* values;
  float* first_moments;
  float* second_moments;
};

/// Every pointer is to the backend's memory unless it says otherwise. Calls run in the order in
/// which they are made. Two runs give equal bits: sums have fixed orders.
///
/// Functions named add_ add to their output; the others overwrite it. Where a function takes
/// `shards`, they are places among this rank's tokens, one after the other from token 0: what is
/// computed for a shard does not depend on which other shards this rank has, so that the number of
/// ranks changes nothing.
class Operations {
 public:
  Operations() = default;
  Operations(const Operations&) = delete;
  Operations& operator=(const Operations&) = delete;
  virtual ~Operations() = default;

  /// A multiple of 4 bytes.
  virtual void zero(void* to, std::size_t bytes) = 0;
  virtual void copy(void* to, const void* from, std::size_t bytes) = 0;

  virtual void round_to_bf16(std::int64_t count, const float* from, bf16* to) = 0;
  virtual void widen(std::int64_t count, const bf16* from, float* to) = 0;
  virtual void add_widened(std::int64_t count, const bf16* from, float* to) = 0;

  /// c_TN = a_TK b_NK^T.
  virtual void multiply_by_transposed(std::span<const Share> shards, ProductSize size,
                                      const float* a_TK, const float* b_NK, float* c_TN) = 0;
  /// c_TN += a_TK b_KN.
  virtual void add_product(std::span<const Share> shards, ProductSize size, const float* a_TK,
                           const float* b_KN, float* c_TN) = 0;
  /// c_MN += a_TM^T b_TN, over the `num_tokens` tokens of one shard, the first of which both
  /// pointers name.
  virtual void add_product_over_tokens(std::int64_t num_tokens, std::int64_t m, std::int64_t n,
                                       const float* a_TM, const float* b_TN, float* c_MN) = 0;

  /// embed() of dense_ops.h.
  virtual void embed(const EmbeddingShape& shape, const std::uint8_t* contexts_Tn,
                     const float* embedding_VH, const float* position_nH, float* x_TH) = 0;
  /// Over the tokens of one shard.
  virtual void add_embed_gradients(const EmbeddingShape& shape, const std::uint8_t* contexts_Tn,
                                   const float* embedding_VH, const float* position_nH,
                                   const float* dx_TH, float* d_embedding_VH,
                                   float* d_position_nH) = 0;

  /// rms_norm() of dense_ops.h.
  virtual void rms_norm(std::int64_t num_tokens, std::int64_t hidden_dim, const float* x_TH,
                        const float* weight_H, float* y_TH, float* inverse_rms_T) = 0;
  /// Over the tokens of one shard; adds to dx and d_weight.
  virtual void add_rms_norm_gradients(std::int64_t num_tokens, std::int64_t hidden_dim,
                                      const float* x_TH, const float* weight_H,
                                      const float* inverse_rms_T, const float* dy_TH, float* dx_TH,
                                      float* d_weight_H) = 0;

  /// Writes for each shard the sum over its tokens of -log softmax(logits_t)[target_t], in nats.
  virtual void cross_entropy(std::span<const Share> shards, const std::uint8_t* targets_T,
                             const float* logits_TV, double* losses_S) = 0;
  /// The same, and the logits become `scale` times the gradient of the sums.
  virtual void cross_entropy_gradient(std::span<const Share> shards, const std::uint8_t* targets_T,
                                      float scale, float* logits_TV, double* losses_S) = 0;

  /// total[i] = sum of part[i] over the parts, in their order. Parts may be peers' memory.
  virtual void sum_in_order(std::span<const float* const> parts, std::int64_t count,
                            float* total) = 0;
  /// Writes the sum of squares of every part of all `arrays`, in their order, to `sums`, which is
  /// host memory. Waits.
  virtual void square_sums(std::span<const EqualParts> arrays, std::span<double> sums) = 0;
  /// A step of AdamW as adamw_step() has it, with values multiplied by `decay_factor` first.
  virtual void adamw(const AdamWFactors& factors, float decay_factor, const AdamWState& state) = 0;
};

}  // namespace megamoe::trainer
