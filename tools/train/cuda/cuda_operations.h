// The trainer's operations on a GPU: products by cuBLAS, the rest by the kernels of kernels.h.
#pragma once

#include "common/cublas_library.h"
#include "train/backend.h"
#include "train/cuda/runtime.h"

namespace megamoe::trainer::cuda {

class CudaOperations final : public Operations {
 public:
  /// The stream's device is current, at every call as well. Throws Error (unsupported) without
  /// cuBLAS.
  explicit CudaOperations(cudaStream_t stream) : stream_(stream), cublas_(stream) {}

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
  /// c_TN = or += a_TK b, shard by shard.
  void multiply_shards(std::span<const Share> shards, ProductSize size, const float* a_TK,
                       const float* b, tools::Layout b_layout, float* c_TN,
                       tools::MatrixProduct::Write write);
  /// Device memory for at least `count` doubles; until the next call.
  double* doubles(std::int64_t count);

  cudaStream_t stream_;
  tools::Cublas cublas_;
  std::shared_ptr<std::byte> doubles_;
  std::int64_t num_doubles_ = 0;
};

}  // namespace megamoe::trainer::cuda
