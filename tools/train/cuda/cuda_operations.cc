#include "train/cuda/cuda_operations.h"

#include <algorithm>

#include "train/cuda/kernels.h"

namespace megamoe::trainer::cuda {
namespace {

using tools::Layout;
using tools::MatrixProduct;

ShardList list_of(std::span<const Share> shards) {
  ShardList list{};
  for (const Share& shard : shards) list.shards[list.count++] = shard;
  return list;
}

}  // namespace

double* CudaOperations::doubles(std::int64_t count) {
  if (count > num_doubles_) {
    doubles_ = allocate(static_cast<std::size_t>(count) * sizeof(double), stream_);
    num_doubles_ = count;
  }
  return reinterpret_cast<double*>(doubles_.get());
}

void CudaOperations::zero(void* to, std::size_t bytes) {
  if (bytes != 0) check(cudaMemsetAsync(to, 0, bytes, stream_), "clearing device memory");
}

void CudaOperations::copy(void* to, const void* from, std::size_t bytes) {
  if (bytes == 0) return;
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream_), "a device copy");
}

void CudaOperations::round_to_bf16(std::int64_t count, const float* from, bf16* to) {
  cuda::round_to_bf16(count, from, to, stream_);
}
void CudaOperations::widen(std::int64_t count, const bf16* from, float* to) {
  cuda::widen(count, from, to, stream_);
}
void CudaOperations::add_widened(std::int64_t count, const bf16* from, float* to) {
  cuda::add_widened(count, from, to, stream_);
}

// A product a shard: which kernel cuBLAS takes, and with it the order of a sum, depends on the
// number of rows, and that of a shard is the same for every number of ranks.
void CudaOperations::multiply_shards(std::span<const Share> shards, ProductSize size,
                                     const float* a_TK, const float* b, tools::Layout b_layout,
                                     float* c_TN, tools::MatrixProduct::Write write) {
  for (const Share& shard : shards) {
    cublas_.multiply({.element = MatrixProduct::Element::fp32,
                      .m = shard.count,
                      .n = size.columns,
                      .k = size.depth,
                      .a = a_TK + shard.first * size.depth,
                      .a_layout = Layout::as_named,
                      .b = b,
                      .b_layout = b_layout,
                      .c = c_TN + shard.first * size.columns,
                      .write = write});
  }
}

void CudaOperations::multiply_by_transposed(std::span<const Share> shards, ProductSize size,
                                            const float* a_TK, const float* b_NK, float* c_TN) {
  multiply_shards(shards, size, a_TK, b_NK, Layout::transposed, c_TN, MatrixProduct::Write::store);
}

void CudaOperations::add_product(std::span<const Share> shards, ProductSize size, const float* a_TK,
                                 const float* b_KN, float* c_TN) {
  multiply_shards(shards, size, a_TK, b_KN, Layout::as_named, c_TN, MatrixProduct::Write::add);
}

void CudaOperations::add_product_over_tokens(std::int64_t num_tokens, std::int64_t m,
                                             std::int64_t n, const float* a_TM, const float* b_TN,
                                             float* c_MN) {
  if (num_tokens == 0) return;
  cublas_.multiply({.element = MatrixProduct::Element::fp32,
                    .m = m,
                    .n = n,
                    .k = num_tokens,
                    .a = a_TM,
                    .a_layout = Layout::transposed,
                    .b = b_TN,
                    .b_layout = Layout::as_named,
                    .c = c_MN,
                    .write = MatrixProduct::Write::add});
}

void CudaOperations::embed(const EmbeddingShape& shape, const std::uint8_t* contexts_Tn,
                           const float* embedding_VH, const float* position_nH, float* x_TH) {
  cuda::embed(shape, contexts_Tn, embedding_VH, position_nH, x_TH, stream_);
}

void CudaOperations::add_embed_gradients(const EmbeddingShape& shape,
                                         const std::uint8_t* contexts_Tn, const float* embedding_VH,
                                         const float* position_nH, const float* dx_TH,
                                         float* d_embedding_VH, float* d_position_nH) {
  cuda::add_embed_gradients(shape, contexts_Tn, embedding_VH, position_nH, dx_TH, d_embedding_VH,
                            d_position_nH, stream_);
}

void CudaOperations::rms_norm(std::int64_t num_tokens, std::int64_t hidden_dim, const float* x_TH,
                              const float* weight_H, float* y_TH, float* inverse_rms_T) {
  cuda::rms_norm(num_tokens, hidden_dim, x_TH, weight_H, y_TH, inverse_rms_T, stream_);
}

void CudaOperations::add_rms_norm_gradients(std::int64_t num_tokens, std::int64_t hidden_dim,
                                            const float* x_TH, const float* weight_H,
                                            const float* inverse_rms_T, const float* dy_TH,
                                            float* dx_TH, float* d_weight_H) {
  cuda::add_rms_norm_gradients(num_tokens, hidden_dim, x_TH, weight_H, inverse_rms_T, dy_TH, dx_TH,
                               d_weight_H, stream_);
}

void CudaOperations::cross_entropy(std::span<const Share> shards, const std::uint8_t* targets_T,
                                   const float* logits_TV, double* losses_S) {
  const std::int64_t num_tokens = num_tokens_of(shards);
  double* losses_T = doubles(num_tokens);
  cuda::cross_entropy(num_tokens, targets_T, logits_TV, losses_T, stream_);
  sum_of_shards(list_of(shards), losses_T, losses_S, stream_);
}

void CudaOperations::cross_entropy_gradient(std::span<const Share> shards,
                                            const std::uint8_t* targets_T, float scale,
                                            float* logits_TV, double* losses_S) {
  const std::int64_t num_tokens = num_tokens_of(shards);
  double* losses_T = doubles(num_tokens);
  cuda::cross_entropy_gradient(num_tokens, targets_T, scale, logits_TV, losses_T, stream_);
  sum_of_shards(list_of(shards), losses_T, losses_S, stream_);
}

void CudaOperations::sum_in_order(std::span<const float* const> parts, std::int64_t count,
                                  float* total) {
  PartList list{};
  for (const float* part : parts) list.parts[list.count++] = part;
  cuda::sum_in_order(list, count, total, stream_);
}

void CudaOperations::square_sums(std::span<const EqualParts> arrays, std::span<double> sums) {
  double* next = doubles(static_cast<std::int64_t>(sums.size()));
  const double* first = next;
  for (const EqualParts& array : arrays) {
    cuda::square_sums(array, next, stream_);
    next += array.num_parts;
  }
  check(cudaMemcpyAsync(sums.data(), first, sums.size_bytes(), cudaMemcpyDeviceToHost, stream_),
        "a download");
  check(cudaStreamSynchronize(stream_), "sums of squares");
}

void CudaOperations::adamw(const AdamWFactors& factors, float decay_factor,
                           const AdamWState& state) {
  cuda::adamw(factors, decay_factor, state, stream_);
}

}  // namespace megamoe::trainer::cuda
