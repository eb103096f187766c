// The dense parts of the model, forward and backward: embedding of a context, RMS norm, output head
// and cross entropy. Plain loops of one thread; the experts are where the work is.
//
// Shapes: T tokens of this rank, n bytes of context, H hidden, V = 256 byte values.
//
// Real is float in the model and double in the tests, which compare with finite differences.
// Functions named add_ add to their output; the others overwrite it.
#pragma once

#include <cstdint>

namespace megamoe::trainer {

inline constexpr std::int64_t kVocabulary = 256;

/// c_MN += a_MK b_KN, row-major. An element's sum does not depend on where it lies, so a token's
/// result does not depend on which rank has it.
template <class Real>
void add_product(const Real* a_MK, const Real* b_KN, Real* c_MN, std::int64_t m, std::int64_t n,
                 std::int64_t k);

/// out_NM = in_MN^T.
template <class Real>
void transpose(const Real* in_MN, Real* out_NM, std::int64_t m, std::int64_t n);

struct EmbeddingShape {
  std::int64_t num_tokens;  ///< T
  std::int64_t context;     ///< n
  std::int64_t hidden_dim;  ///< H
};

/// x_t = sqrt(H) * sum_i position_i * embedding[byte_ti], elementwise in H: every position of the
/// context weighs the channels of the embedding in its own way.
template <class Real>
void embed(const EmbeddingShape& shape, const std::uint8_t* contexts_Tn, const Real* embedding_VH,
           const Real* position_nH, Real* x_TH);
template <class Real>
void add_embed_gradients(const EmbeddingShape& shape, const std::uint8_t* contexts_Tn,
                         const Real* embedding_VH, const Real* position_nH, const Real* dx_TH,
                         Real* d_embedding_VH, Real* d_position_nH);

inline constexpr double kNormEpsilon = 1e-6;

/// y_t = weight * x_t / rms(x_t), rms(x)^2 = mean(x^2) + kNormEpsilon; keeps 1 / rms.
template <class Real>
void rms_norm(std::int64_t num_tokens, std::int64_t hidden_dim, const Real* x_TH,
              const Real* weight_H, Real* y_TH, Real* inverse_rms_T);
/// Adds to dx and d_weight.
template <class Real>
void add_rms_norm_gradients(std::int64_t num_tokens, std::int64_t hidden_dim, const Real* x_TH,
                            const Real* weight_H, const Real* inverse_rms_T, const Real* dy_TH,
                            Real* dx_TH, Real* d_weight_H);

/// Sum over tokens of -log softmax(logits_t)[target_t], in nats; the logits become
/// `scale` times the gradient of that sum.
template <class Real>
double cross_entropy_gradient(std::int64_t num_tokens, const std::uint8_t* targets_T, Real scale,
                              Real* logits_TV);
/// The sum alone.
template <class Real>
double cross_entropy(std::int64_t num_tokens, const std::uint8_t* targets_T, const Real* logits_TV);

}  // namespace megamoe::trainer
