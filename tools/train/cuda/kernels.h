// Launches of the trainer's kernels, on device pointers and in stream order. What they compute is
// what Operations says; no sum uses atomics, so that two runs give equal bits.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "megamoe/bf16.h"
#include "train/operations.h"
#include "train/sharding.h"

namespace megamoe::trainer::cuda {

/// The shards of a rank, as an argument of a kernel.
struct ShardList {
  Share shards[kNumShards];
  int count = 0;
};

/// What all ranks' shards have of one array; at most kNumShards.
struct PartList {
  const float* parts[kNumShards];
  int count = 0;
};

void round_to_bf16(std::int64_t count, const float* from, bf16* to, cudaStream_t stream);
void widen(std::int64_t count, const bf16* from, float* to, cudaStream_t stream);
void add_widened(std::int64_t count, const bf16* from, float* to, cudaStream_t stream);
void sum_in_order(const PartList& parts, std::int64_t count, float* total, cudaStream_t stream);
void adamw(const AdamWFactors& factors, float decay_factor, const AdamWState& state,
           cudaStream_t stream);

void embed(const EmbeddingShape& shape, const std::uint8_t* contexts_Tn, const float* embedding_VH,
           const float* position_nH, float* x_TH, cudaStream_t stream);
void add_embed_gradients(const EmbeddingShape& shape, const std::uint8_t* contexts_Tn,
                         const float* embedding_VH, const float* position_nH, const float* dx_TH,
                         float* d_embedding_VH, float* d_position_nH, cudaStream_t stream);

void rms_norm(std::int64_t num_tokens, std::int64_t hidden_dim, const float* x_TH,
              const float* weight_H, float* y_TH, float* inverse_rms_T, cudaStream_t stream);
void add_rms_norm_gradients(std::int64_t num_tokens, std::int64_t hidden_dim, const float* x_TH,
                            const float* weight_H, const float* inverse_rms_T, const float* dy_TH,
                            float* dx_TH, float* d_weight_H, cudaStream_t stream);

/// Writes each token's loss to losses_T; the logits are only read.
void cross_entropy(std::int64_t num_tokens, const std::uint8_t* targets_T, const float* logits_TV,
                   double* losses_T, cudaStream_t stream);
/// The same, and turns the logits into `scale` times the gradient of the losses' sum.
void cross_entropy_gradient(std::int64_t num_tokens, const std::uint8_t* targets_T, float scale,
                            float* logits_TV, double* losses_T, cudaStream_t stream);
void sum_of_shards(const ShardList& shards, const double* values_T, double* sums_S,
                   cudaStream_t stream);

/// Writes one sum a part.
void square_sums(const EqualParts& array, double* sums, cudaStream_t stream);

}  // namespace megamoe::trainer::cuda
