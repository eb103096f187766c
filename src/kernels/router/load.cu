// Load statistics of a batch, the auxiliary loss' value, and balancing by biases.
#include <algorithm>

#include "kernels/launch.h"
#include "kernels/router/load.cuh"

namespace megamoe::gpu {
namespace {

/// What a block has of its tokens.
struct BlockLoad {
  double score_sums[kRouterWarps][detail::kMaxCudaRouterExperts];
  unsigned counts_E[detail::kMaxCudaRouterExperts];
};

/// Adds a warp's tokens; scores in registers, counts (whole numbers: any order) in shared memory.
template <int kPerLane>
__device__ void add_tokens(const RouterConfig& config, const RouterReads& reads,
                           const RouterScratch& scratch, double (&score_sums)[kPerLane],
                           unsigned* counts_E) {
  const int num_experts = static_cast<int>(config.num_experts);
  for (std::int64_t token = blockIdx.x * std::int64_t{kRouterWarps} + device::warp_idx();
       token < reads.num_tokens; token += gridDim.x * std::int64_t{kRouterWarps}) {
    Experts<kPerLane> logits;
    Slot slot;
    if (!load_logits(reads, num_experts, token, logits) ||
        !load_ids(reads, num_experts, token, slot)) {
      refuse(scratch, token);
      continue;
    }
    if (slot.expert >= 0) atomicAdd(&counts_E[slot.expert], 1U);
    const Experts<kPerLane> scores = scores_of(config.score_function, logits);
    const float divisor = probability_divisor(config.score_function, scores);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      score_sums[i] += static_cast<double>(scores.values[i] / divisor);
    }
  }
}

/// Writes this block's row of scratch.load_sums: counts, score sums.
template <int kPerLane>
__global__ __launch_bounds__(kRouterThreads) void block_load_kernel(const RouterConfig config,
                                                                    const RouterReads reads,
                                                                    const RouterScratch scratch) {
  __shared__ BlockLoad block;
  const int num_experts = static_cast<int>(config.num_experts);
  const int thread = static_cast<int>(threadIdx.x);
  for (int j = thread; j < num_experts; j += kRouterThreads) block.counts_E[j] = 0;
  __syncthreads();
  double score_sums[kPerLane] = {};
  add_tokens<kPerLane>(config, reads, scratch, score_sums, block.counts_E);
  double* warp_sums_E = block.score_sums[device::warp_idx()];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int expert = Experts<kPerLane>::expert(i);
    if (expert < num_experts) warp_sums_E[expert] = score_sums[i];
  }
  __syncthreads();
  double* row = scratch.load_sums + std::int64_t{blockIdx.x} * 2 * num_experts;
  for (int j = thread; j < num_experts; j += kRouterThreads) {
    double sum = 0.0;
    for (int warp = 0; warp < kRouterWarps; ++warp) sum += block.score_sums[warp][j];
    row[j] = static_cast<double>(block.counts_E[j]);
    row[num_experts + j] = sum;
  }
}

/// Adds the blocks' rows, in order, and the number of tokens to the load; a thread an element.
__global__ __launch_bounds__(kRouterThreads) void add_blocks_kernel(const double* load_sums,
                                                                    int num_blocks, int num_experts,
                                                                    std::int64_t num_tokens,
                                                                    double* load) {
  const int element = static_cast<int>(blockIdx.x * kRouterThreads + threadIdx.x);
  if (element > 2 * num_experts) return;
  double sum = 0.0;
  if (element == 2 * num_experts) {
    sum = static_cast<double>(num_tokens);
  } else {
    for (int block = 0; block < num_blocks; ++block) {
      sum += load_sums[std::int64_t{block} * 2 * num_experts + element];
    }
  }
  load[element] += sum;
}

__global__ __launch_bounds__(kRouterThreads) void aux_loss_kernel(const RouterConfig config,
                                                                  const RouterReads reads,
                                                                  float* loss,
                                                                  const RouterScratch scratch) {
  LoadTotals totals;
  if (!read_load(config, reads, totals)) {
    if (device::warp_idx() == 0) refuse(scratch, kCallRefused);
    return;
  }
  const int num_experts = static_cast<int>(config.num_experts);
  double sum = 0.0;
  for (int j = static_cast<int>(threadIdx.x); j < num_experts; j += kRouterThreads) {
    sum += slot_share(reads, totals, j) * reads.load[num_experts + j];
  }
  sum = block_sum(sum) / fmax(totals.num_tokens, 1.0);
  const bool is_empty = totals.num_slots == 0 || totals.num_tokens == 0.0;
  if (threadIdx.x != 0) return;
  *loss = is_empty ? 0.0F
                   : static_cast<float>(static_cast<double>(config.aux_loss_alpha) *
                                        static_cast<double>(num_experts) * sum);
}

__global__ __launch_bounds__(kRouterThreads) void update_bias_kernel(const RouterConfig config,
                                                                     const RouterReads reads,
                                                                     float rate, float* bias_E,
                                                                     const RouterScratch scratch) {
  LoadTotals totals;
  if (!read_load(config, reads, totals)) {
    if (device::warp_idx() == 0) refuse(scratch, kCallRefused);
    return;
  }
  const int num_experts = static_cast<int>(config.num_experts);
  for (int j = static_cast<int>(threadIdx.x); j < num_experts; j += kRouterThreads) {
    // Against the mean in whole numbers, so that equal is exact.
    const long long load = static_cast<long long>(reads.load[j]) * num_experts;
    if (load < totals.num_slots) bias_E[j] += rate;
    if (load > totals.num_slots) bias_E[j] -= rate;
  }
}

}  // namespace

void add_load(const RouterConfig& config, const RouterReads& reads, double* load,
              const RouterScratch& scratch, cudaStream_t stream) {
  if (reads.num_tokens == 0) return;
  const auto num_blocks = static_cast<int>(
      std::min<std::int64_t>(kMaxLoadBlocks, (reads.num_tokens + kRouterWarps - 1) / kRouterWarps));
  kernel_for(config.num_experts, &block_load_kernel<4>, &block_load_kernel<8>,
             &block_load_kernel<16>)<<<num_blocks, kRouterThreads, 0, stream>>>(config, reads,
                                                                                scratch);
  check_launch("add_load");
  const auto num_experts = static_cast<int>(config.num_experts);
  add_blocks_kernel<<<2 * num_experts / kRouterThreads + 1, kRouterThreads, 0, stream>>>(
      scratch.load_sums, num_blocks, num_experts, reads.num_tokens, load);
  check_launch("add_load");
}

void aux_loss(const RouterConfig& config, const RouterReads& reads, float* loss,
              const RouterScratch& scratch, cudaStream_t stream) {
  aux_loss_kernel<<<1, kRouterThreads, 0, stream>>>(config, reads, loss, scratch);
  check_launch("aux_loss");
}

void update_bias(const RouterConfig& config, const RouterReads& reads, float rate, float* bias_E,
                 const RouterScratch& scratch, cudaStream_t stream) {
  update_bias_kernel<<<1, kRouterThreads, 0, stream>>>(config, reads, rate, bias_E, scratch);
  check_launch("update_bias");
}

void load_balance_router_kernels() {
  load_kernel(reinterpret_cast<const void*>(&block_load_kernel<4>));
  load_kernel(reinterpret_cast<const void*>(&block_load_kernel<8>));
  load_kernel(reinterpret_cast<const void*>(&block_load_kernel<16>));
  load_kernel(reinterpret_cast<const void*>(&add_blocks_kernel));
  load_kernel(reinterpret_cast<const void*>(&aux_loss_kernel));
  load_kernel(reinterpret_cast<const void*>(&update_bias_kernel));
}

}  // namespace megamoe::gpu
