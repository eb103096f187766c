#include "train/cpu/cpu_operations.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "train/dense_ops.h"

namespace megamoe::trainer {
namespace {

/// Eight interleaved sums, so that the additions need not wait for each other.
double square_sum(const float* values, std::int64_t count) {
  constexpr std::int64_t kWays = 8;
  double sums[kWays] = {};
  for (std::int64_t i = 0; i < count; ++i) {
    sums[i % kWays] += static_cast<double>(values[i]) * static_cast<double>(values[i]);
  }
  double total = 0;
  for (const double sum : sums) total += sum;
  return total;
}

}  // namespace

float* CpuOperations::transposed(std::int64_t count) {
  if (static_cast<std::int64_t>(transposed_.size()) < count) transposed_.resize(count);
  return transposed_.data();
}

void CpuOperations::zero(void* to, std::size_t bytes) { std::memset(to, 0, bytes); }

void CpuOperations::copy(void* to, const void* from, std::size_t bytes) {
  std::memcpy(to, from, bytes);
}

void CpuOperations::round_to_bf16(std::int64_t count, const float* from, bf16* to) {
  for (std::int64_t i = 0; i < count; ++i) to[i] = to_bf16(from[i]);
}

void CpuOperations::widen(std::int64_t count, const bf16* from, float* to) {
  for (std::int64_t i = 0; i < count; ++i) to[i] = to_float(from[i]);
}

void CpuOperations::add_widened(std::int64_t count, const bf16* from, float* to) {
  for (std::int64_t i = 0; i < count; ++i) to[i] += to_float(from[i]);
}

// A row's result depends on nothing but the row, so the shards' rows are one product.
void CpuOperations::multiply_by_transposed(std::span<const Share> shards, ProductSize size,
                                           const float* a_TK, const float* b_NK, float* c_TN) {
  const std::int64_t num_tokens = num_tokens_of(shards);
  float* b_KN = transposed(size.columns * size.depth);
  transpose(b_NK, b_KN, size.columns, size.depth);
  std::fill_n(c_TN, num_tokens * size.columns, 0.0F);
  trainer::add_product(a_TK, b_KN, c_TN, num_tokens, size.columns, size.depth);
}

void CpuOperations::add_product(std::span<const Share> shards, ProductSize size, const float* a_TK,
                                const float* b_KN, float* c_TN) {
  trainer::add_product(a_TK, b_KN, c_TN, num_tokens_of(shards), size.columns, size.depth);
}

void CpuOperations::add_product_over_tokens(std::int64_t num_tokens, std::int64_t m, std::int64_t n,
                                            const float* a_TM, const float* b_TN, float* c_MN) {
  float* a_MT = transposed(m * num_tokens);
  transpose(a_TM, a_MT, num_tokens, m);
  trainer::add_product(a_MT, b_TN, c_MN, m, n, num_tokens);
}

void CpuOperations::embed(const EmbeddingShape& shape, const std::uint8_t* contexts_Tn,
                          const float* embedding_VH, const float* position_nH, float* x_TH) {
  trainer::embed(shape, contexts_Tn, embedding_VH, position_nH, x_TH);
}

void CpuOperations::add_embed_gradients(const EmbeddingShape& shape,
                                        const std::uint8_t* contexts_Tn, const float* embedding_VH,
                                        const float* position_nH, const float* dx_TH,
                                        float* d_embedding_VH, float* d_position_nH) {
  trainer::add_embed_gradients(shape, contexts_Tn, embedding_VH, position_nH, dx_TH, d_embedding_VH,
                               d_position_nH);
}

void CpuOperations::rms_norm(std::int64_t num_tokens, std::int64_t hidden_dim, const float* x_TH,
                             const float* weight_H, float* y_TH, float* inverse_rms_T) {
  trainer::rms_norm(num_tokens, hidden_dim, x_TH, weight_H, y_TH, inverse_rms_T);
}

void CpuOperations::add_rms_norm_gradients(std::int64_t num_tokens, std::int64_t hidden_dim,
                                           const float* x_TH, const float* weight_H,
                                           const float* inverse_rms_T, const float* dy_TH,
                                           float* dx_TH, float* d_weight_H) {
  trainer::add_rms_norm_gradients(num_tokens, hidden_dim, x_TH, weight_H, inverse_rms_T, dy_TH,
                                  dx_TH, d_weight_H);
}

void CpuOperations::cross_entropy(std::span<const Share> shards, const std::uint8_t* targets_T,
                                  const float* logits_TV, double* losses_S) {
  for (std::size_t i = 0; i < shards.size(); ++i) {
    const Share& shard = shards[i];
    losses_S[i] = trainer::cross_entropy(shard.count, targets_T + shard.first,
                                         logits_TV + shard.first * kVocabulary);
  }
}

void CpuOperations::cross_entropy_gradient(std::span<const Share> shards,
                                           const std::uint8_t* targets_T, float scale,
                                           float* logits_TV, double* losses_S) {
  for (std::size_t i = 0; i < shards.size(); ++i) {
    const Share& shard = shards[i];
    losses_S[i] = trainer::cross_entropy_gradient(shard.count, targets_T + shard.first, scale,
                                                  logits_TV + shard.first * kVocabulary);
  }
}

void CpuOperations::sum_in_order(std::span<const float* const> parts, std::int64_t count,
                                 float* total) {
  std::fill_n(total, count, 0.0F);
  for (const float* part : parts) {
    for (std::int64_t i = 0; i < count; ++i) total[i] += part[i];
  }
}

void CpuOperations::square_sums(std::span<const EqualParts> arrays, std::span<double> sums) {
  auto next = sums.begin();
  for (const EqualParts& array : arrays) {
    for (std::int64_t part = 0; part < array.num_parts; ++part) {
      *next++ = square_sum(array.values + part * array.part_count, array.part_count);
    }
  }
}

void CpuOperations::adamw(const AdamWFactors& factors, float decay_factor,
                          const AdamWState& state) {
  for (std::int64_t i = 0; i < state.count; ++i) {
    const float gradient = state.gradients[i] * factors.gradient_scale;
    float& first = state.first_moments[i];
    float& second = state.second_moments[i];
    first = factors.beta1 * first + (1.0F - factors.beta1) * gradient;
    second = factors.beta2 * second + (1.0F - factors.beta2) * gradient * gradient;
    const float denominator = std::sqrt(second * factors.v_correction) + factors.epsilon;
    state.values[i] = state.values[i] * decay_factor - factors.rate * first / denominator;
  }
}

}  // namespace megamoe::trainer
