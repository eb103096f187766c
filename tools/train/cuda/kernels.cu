#include <algorithm>

#include "train/cuda/kernels.h"
#include "train/cuda/runtime.h"

namespace megamoe::trainer::cuda {
namespace {

constexpr int kThreads = 256;
static_assert(kThreads == kVocabulary, "cross entropy has a thread a byte");
constexpr std::int64_t kMaxBlocks = 2048;

void check_launch(const char* what) { check(cudaGetLastError(), what); }

unsigned blocks_for(std::int64_t count, std::int64_t per_block) {
  return static_cast<unsigned>((count + per_block - 1) / per_block);
}

template <class Body>
__global__ void for_each_kernel(std::int64_t count, Body body) {
  const std::int64_t stride = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count;
       i += stride) {
    body(i);
  }
}

/// body(i) for every i < count, each on its own.
template <class Body>
void for_each(std::int64_t count, const Body& body, cudaStream_t stream, const char* what) {
  if (count == 0) return;
  const unsigned blocks =
      static_cast<unsigned>(std::min<std::int64_t>(kMaxBlocks, blocks_for(count, kThreads)));
  for_each_kernel<<<blocks, kThreads, 0, stream>>>(count, body);
  check_launch(what);
}

/// Combines one value of each thread by a fixed tree; every thread gets the result.
template <class T, class Combine>
__device__ T combine_block(T value, Combine combine) {
  __shared__ T values[kThreads];
  __syncthreads();  // of the call before
  values[threadIdx.x] = value;
  __syncthreads();
  for (unsigned half = kThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) {
      values[threadIdx.x] = combine(values[threadIdx.x], values[threadIdx.x + half]);
    }
    __syncthreads();
  }
  return values[0];
}
struct Sum {
  __device__ double operator()(double left, double right) const { return left + right; }
};
struct Larger {
  __device__ float operator()(float left, float right) const { return fmaxf(left, right); }
};

struct RoundToBf16 {
  const float* from;
  bf16* to;
  __device__ void operator()(std::int64_t i) const { to[i] = to_bf16(from[i]); }
};
struct Widen {
  const bf16* from;
  float* to;
  __device__ void operator()(std::int64_t i) const { to[i] = to_float(from[i]); }
};
struct AddWidened {
  const bf16* from;
  float* to;
  __device__ void operator()(std::int64_t i) const { to[i] += to_float(from[i]); }
};
struct SumInOrder {
  PartList list;
  float* total;
  __device__ void operator()(std::int64_t i) const {
    float sum = 0.0F;
    for (int part = 0; part < list.count; ++part) sum += list.parts[part][i];
    total[i] = sum;
  }
};
struct AdamW {
  AdamWFactors factors;
  float decay_factor;
  AdamWState state;
  __device__ void operator()(std::int64_t i) const {
    const float gradient = state.gradients[i] * factors.gradient_scale;
    const float first = factors.beta1 * state.first_moments[i] + (1.0F - factors.beta1) * gradient;
    const float second =
        factors.beta2 * state.second_moments[i] + (1.0F - factors.beta2) * gradient * gradient;
    const float denominator = sqrtf(second * factors.v_correction) + factors.epsilon;
    state.first_moments[i] = first;
    state.second_moments[i] = second;
    state.values[i] = state.values[i] * decay_factor - factors.rate * first / denominator;
  }
};

/// A block a token.
__global__ void embed_kernel(EmbeddingShape shape, const std::uint8_t* contexts_Tn,
                             const float* embedding_VH, const float* position_nH, float* x_TH) {
  const std::uint8_t* context = contexts_Tn + blockIdx.x * shape.context;
  const float scale = sqrtf(static_cast<float>(shape.hidden_dim));
  for (std::int64_t h = threadIdx.x; h < shape.hidden_dim; h += blockDim.x) {
    float sum = 0.0F;
    for (std::int64_t i = 0; i < shape.context; ++i) {
      sum +=
          position_nH[i * shape.hidden_dim + h] * embedding_VH[context[i] * shape.hidden_dim + h];
    }
    x_TH[blockIdx.x * shape.hidden_dim + h] = scale * sum;
  }
}

/// A block a byte value: it looks for its byte in all contexts, in their order, so that the sum
/// needs no atomics. Bytes are few and contexts short.
__global__ void embedding_gradient_kernel(EmbeddingShape shape, const std::uint8_t* contexts_Tn,
                                          const float* position_nH, const float* dx_TH,
                                          float* d_embedding_VH) {
  const float scale = sqrtf(static_cast<float>(shape.hidden_dim));
  for (std::int64_t h = threadIdx.x; h < shape.hidden_dim; h += blockDim.x) {
    float sum = 0.0F;
    for (std::int64_t token = 0; token < shape.num_tokens; ++token) {
      for (std::int64_t i = 0; i < shape.context; ++i) {
        if (contexts_Tn[token * shape.context + i] != blockIdx.x) continue;
        sum += scale * dx_TH[token * shape.hidden_dim + h] * position_nH[i * shape.hidden_dim + h];
      }
    }
    d_embedding_VH[blockIdx.x * shape.hidden_dim + h] += sum;
  }
}

/// A block a position.
__global__ void position_gradient_kernel(EmbeddingShape shape, const std::uint8_t* contexts_Tn,
                                         const float* embedding_VH, const float* dx_TH,
                                         float* d_position_nH) {
  const float scale = sqrtf(static_cast<float>(shape.hidden_dim));
  for (std::int64_t h = threadIdx.x; h < shape.hidden_dim; h += blockDim.x) {
    float sum = 0.0F;
    for (std::int64_t token = 0; token < shape.num_tokens; ++token) {
      const std::int64_t byte = contexts_Tn[token * shape.context + blockIdx.x];
      sum +=
          scale * dx_TH[token * shape.hidden_dim + h] * embedding_VH[byte * shape.hidden_dim + h];
    }
    d_position_nH[blockIdx.x * shape.hidden_dim + h] += sum;
  }
}

/// A block a token.
__global__ void rms_norm_kernel(std::int64_t hidden_dim, const float* x_TH, const float* weight_H,
                                float* y_TH, float* inverse_rms_T) {
  const float* x = x_TH + blockIdx.x * hidden_dim;
  double square_sum = 0.0;
  for (std::int64_t h = threadIdx.x; h < hidden_dim; h += blockDim.x) {
    square_sum += static_cast<double>(x[h]) * static_cast<double>(x[h]);
  }
  const double mean_square = combine_block(square_sum, Sum()) / static_cast<double>(hidden_dim);
  const auto inverse_rms = static_cast<float>(1.0 / sqrt(mean_square + kNormEpsilon));
  for (std::int64_t h = threadIdx.x; h < hidden_dim; h += blockDim.x) {
    y_TH[blockIdx.x * hidden_dim + h] = weight_H[h] * (x[h] * inverse_rms);
  }
  if (threadIdx.x == 0) inverse_rms_T[blockIdx.x] = inverse_rms;
}

/// A block a token. With n = x / rms and q = dy * weight: dx = (q - n * mean(q * n)) / rms.
__global__ void add_rms_norm_dx_kernel(std::int64_t hidden_dim, const float* x_TH,
                                       const float* weight_H, const float* inverse_rms_T,
                                       const float* dy_TH, float* dx_TH) {
  const std::int64_t offset = blockIdx.x * hidden_dim;
  const float inverse_rms = inverse_rms_T[blockIdx.x];
  double projection = 0.0;
  for (std::int64_t h = threadIdx.x; h < hidden_dim; h += blockDim.x) {
    projection += static_cast<double>(dy_TH[offset + h] * weight_H[h]) *
                  static_cast<double>(x_TH[offset + h]);
  }
  const auto mean_projection =
      static_cast<float>(combine_block(projection, Sum()) / static_cast<double>(hidden_dim)) *
      inverse_rms;
  for (std::int64_t h = threadIdx.x; h < hidden_dim; h += blockDim.x) {
    const float normed = x_TH[offset + h] * inverse_rms;
    dx_TH[offset + h] += inverse_rms * (dy_TH[offset + h] * weight_H[h] - normed * mean_projection);
  }
}

/// A thread a channel, tokens in order.
struct AddRmsNormWeightGradient {
  std::int64_t num_tokens;
  std::int64_t hidden_dim;
  const float* x_TH;
  const float* inverse_rms_T;
  const float* dy_TH;
  float* d_weight_H;
  __device__ void operator()(std::int64_t h) const {
    float sum = 0.0F;
    for (std::int64_t token = 0; token < num_tokens; ++token) {
      const std::int64_t i = token * hidden_dim + h;
      sum += dy_TH[i] * (x_TH[i] * inverse_rms_T[token]);
    }
    d_weight_H[h] += sum;
  }
};

enum class Leaves : std::uint8_t { logits, gradient };

/// A block a token, a thread a byte.
template <Leaves kLeaves, class Logit>
__global__ void cross_entropy_kernel(const std::uint8_t* targets_T, float scale, Logit* logits_TV,
                                     double* losses_T) {
  Logit& logit = logits_TV[std::int64_t{blockIdx.x} * kVocabulary + threadIdx.x];
  const float value = logit;
  const float highest = combine_block(value, Larger());
  const double sum = combine_block(static_cast<double>(expf(value - highest)), Sum());
  const double log_sum = static_cast<double>(highest) + log(sum);
  const bool is_target = threadIdx.x == targets_T[blockIdx.x];
  if (is_target) losses_T[blockIdx.x] = log_sum - static_cast<double>(value);
  if constexpr (kLeaves == Leaves::gradient) {
    logit = scale * expf(value - static_cast<float>(log_sum)) - (is_target ? scale : 0.0F);
  }
}

/// A block a shard.
__global__ void sum_of_shards_kernel(ShardList list, const double* values_T, double* sums_S) {
  const Share shard = list.shards[blockIdx.x];
  double sum = 0.0;
  for (std::int64_t i = threadIdx.x; i < shard.count; i += blockDim.x) {
    sum += values_T[shard.first + i];
  }
  sum = combine_block(sum, Sum());
  if (threadIdx.x == 0) sums_S[blockIdx.x] = sum;
}

/// A block a part.
__global__ void square_sums_kernel(EqualParts array, double* sums) {
  const float* values = array.values + blockIdx.x * array.part_count;
  double sum = 0.0;
  for (std::int64_t i = threadIdx.x; i < array.part_count; i += blockDim.x) {
    sum += static_cast<double>(values[i]) * static_cast<double>(values[i]);
  }
  sum = combine_block(sum, Sum());
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

}  // namespace

void round_to_bf16(std::int64_t count, const float* from, bf16* to, cudaStream_t stream) {
  for_each(count, RoundToBf16{from, to}, stream, "rounding to bf16");
}
void widen(std::int64_t count, const bf16* from, float* to, cudaStream_t stream) {
  for_each(count, Widen{from, to}, stream, "widening to fp32");
}
void add_widened(std::int64_t count, const bf16* from, float* to, cudaStream_t stream) {
  for_each(count, AddWidened{from, to}, stream, "adding bf16 to fp32");
}
void sum_in_order(const PartList& parts, std::int64_t count, float* total, cudaStream_t stream) {
  for_each(count, SumInOrder{parts, total}, stream, "a sum over the ranks' shards");
}
void adamw(const AdamWFactors& factors, float decay_factor, const AdamWState& state,
           cudaStream_t stream) {
  for_each(state.count, AdamW{factors, decay_factor, state}, stream, "a step of AdamW");
}

void embed(const EmbeddingShape& shape, const std::uint8_t* contexts_Tn, const float* embedding_VH,
           const float* position_nH, float* x_TH, cudaStream_t stream) {
  if (shape.num_tokens == 0) return;
  embed_kernel<<<static_cast<unsigned>(shape.num_tokens), kThreads, 0, stream>>>(
      shape, contexts_Tn, embedding_VH, position_nH, x_TH);
  check_launch("the embedding");
}

void add_embed_gradients(const EmbeddingShape& shape, const std::uint8_t* contexts_Tn,
                         const float* embedding_VH, const float* position_nH, const float* dx_TH,
                         float* d_embedding_VH, float* d_position_nH, cudaStream_t stream) {
  if (shape.num_tokens == 0) return;
  embedding_gradient_kernel<<<static_cast<unsigned>(kVocabulary), kThreads, 0, stream>>>(
      shape, contexts_Tn, position_nH, dx_TH, d_embedding_VH);
  check_launch("the gradient of the embedding");
  position_gradient_kernel<<<static_cast<unsigned>(shape.context), kThreads, 0, stream>>>(
      shape, contexts_Tn, embedding_VH, dx_TH, d_position_nH);
  check_launch("the gradient of the positions");
}

void rms_norm(std::int64_t num_tokens, std::int64_t hidden_dim, const float* x_TH,
              const float* weight_H, float* y_TH, float* inverse_rms_T, cudaStream_t stream) {
  if (num_tokens == 0) return;
  rms_norm_kernel<<<static_cast<unsigned>(num_tokens), kThreads, 0, stream>>>(
      hidden_dim, x_TH, weight_H, y_TH, inverse_rms_T);
  check_launch("an RMS norm");
}

void add_rms_norm_gradients(std::int64_t num_tokens, std::int64_t hidden_dim, const float* x_TH,
                            const float* weight_H, const float* inverse_rms_T, const float* dy_TH,
                            float* dx_TH, float* d_weight_H, cudaStream_t stream) {
  if (num_tokens == 0) return;
  add_rms_norm_dx_kernel<<<static_cast<unsigned>(num_tokens), kThreads, 0, stream>>>(
      hidden_dim, x_TH, weight_H, inverse_rms_T, dy_TH, dx_TH);
  check_launch("the gradient of an RMS norm");
  for_each(hidden_dim,
           AddRmsNormWeightGradient{num_tokens, hidden_dim, x_TH, inverse_rms_T, dy_TH, d_weight_H},
           stream, "the gradient of an RMS norm's weight");
}

void cross_entropy(std::int64_t num_tokens, const std::uint8_t* targets_T, const float* logits_TV,
                   double* losses_T, cudaStream_t stream) {
  if (num_tokens == 0) return;
  cross_entropy_kernel<Leaves::logits><<<static_cast<unsigned>(num_tokens), kThreads, 0, stream>>>(
      targets_T, 1.0F, logits_TV, losses_T);
  check_launch("the cross entropy");
}

void cross_entropy_gradient(std::int64_t num_tokens, const std::uint8_t* targets_T, float scale,
                            float* logits_TV, double* losses_T, cudaStream_t stream) {
  if (num_tokens == 0) return;
  cross_entropy_kernel<Leaves::gradient>
      <<<static_cast<unsigned>(num_tokens), kThreads, 0, stream>>>(targets_T, scale, logits_TV,
                                                                   losses_T);
  check_launch("the gradient of the cross entropy");
}

void sum_of_shards(const ShardList& shards, const double* values_T, double* sums_S,
                   cudaStream_t stream) {
  if (shards.count == 0) return;
  sum_of_shards_kernel<<<static_cast<unsigned>(shards.count), kThreads, 0, stream>>>(
      shards, values_T, sums_S);
  check_launch("the sums of shards");
}

void square_sums(const EqualParts& array, double* sums, cudaStream_t stream) {
  square_sums_kernel<<<static_cast<unsigned>(array.num_parts), kThreads, 0, stream>>>(array, sums);
  check_launch("sums of squares");
}

}  // namespace megamoe::trainer::cuda
