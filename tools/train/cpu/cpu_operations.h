// The trainer's operations as plain loops of one thread; the experts are where the work is.
#pragma once

#include <vector>

#include "train/operations.h"

namespace megamoe::trainer {

class CpuOperations final : public Operations {
 public:
  void zero(void* to, std::size_t bytes) override;
  void copy(void* to, const void* from, std::size_t bytes) override;
  void round_to_bf16(std::int64_t count, const float* from, bf16* to) override;
  void widen(std::int64_t count, const bf16* from, float* to) override;
  void add_widened(std::int64_t count, const bf16* from, float* to) override;
  void multiply_by_transposed(std::span<const Share> shards, ProductSize size, const float* a_TK,
                              const float* b_NK, float* c_TN) override;
  void add_product(std::span<const Share> shards, ProductSize size, const float* a_TK,
                   const float* b_KN, float* c_TN) override;
  void add_product_over_tokens(std::int64_t num_tokens, std::int64_t m, std::int64_t n,
                               const float* a_TM, const float* b_TN, float* c_MN) override;
  void embed(const EmbeddingShape& shape, const std::uint8_t* contexts_Tn,
             const float* embedding_VH, const float* position_nH, float* x_TH) override;
  void add_embed_gradients(const EmbeddingShape& shape, const std::uint8_t* contexts_Tn,
                           const float* embedding_VH, const float* position_nH, const float* dx_TH,
                           float* d_embedding_VH, float* d_position_nH) override;
  void rms_norm(std::int64_t num_tokens, std::int64_t hidden_dim, const float* x_TH,
                const float* weight_H, float* y_TH, float* inverse_rms_T) override;
  void add_rms_norm_gradients(std::int64_t num_tokens, std::int64_t hidden_dim, const float* x_TH,
                              const float* weight_H, const float* inverse_rms_T, const float* dy_TH,
                              float* dx_TH, float* d_weight_H) override;
  void cross_entropy(std::span<const Share> shards, const std::uint8_t* targets_T,
                     const float* logits_TV, double* losses_S) override;
  void cross_entropy_gradient(std::span<const Share> shards, const std::uint8_t* targets_T,
                              float scale, float* logits_TV, double* losses_S) override;
  void sum_in_order(std::span<const float* const> parts, std::int64_t count, float* total) override;
  void square_sums(std::span<const EqualParts> arrays, std::span<double> sums) override;
  void adamw(const AdamWFactors& factors, float decay_factor, const AdamWState& state) override;

 private:
  /// Of at least `count` floats.
  float* transposed(std::int64_t count);
  std::vector<float> transposed_;
};

}  // namespace megamoe::trainer
