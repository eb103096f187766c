// From the gradient of the weights to that of the logits, as routing/router_token.h does it.
#include <algorithm>

#include "kernels/launch.h"
#include "kernels/router/load.cuh"

namespace megamoe::gpu {
namespace {

/// A block prepares the auxiliary loss' slopes once and then works on many tokens.
constexpr std::int64_t kMaxBlocks = 1024;

/// slopes_j = d(aux loss)/d(probability of expert j). False in all threads where load or d_aux_loss
/// is refused.
__device__ bool load_aux_slopes(const RouterConfig& config, const RouterReads& reads,
                                float* slopes_E) {
  LoadTotals totals;
  if (!read_load(config, reads, totals)) return false;
  const float d_aux_loss = reads.d_aux_loss == nullptr ? 1.0F : *reads.d_aux_loss;
  if (!is_finite(d_aux_loss)) return false;
  const int num_experts = static_cast<int>(config.num_experts);
  for (int j = static_cast<int>(threadIdx.x); j < num_experts; j += kRouterThreads) {
    slopes_E[j] = static_cast<float>(static_cast<double>(d_aux_loss) *
                                     static_cast<double>(config.aux_loss_alpha) *
                                     static_cast<double>(num_experts) *
                                     slot_share(reads, totals, j) / fmax(totals.num_tokens, 1.0));
  }
  __syncthreads();
  return true;
}

/// Adds the slots' values to their experts: slots of one expert one after the other.
template <int kPerLane>
__device__ void add_to_experts(const Slot& slot, float value, int num_slots,
                               Experts<kPerLane>& sums) {
  for (int k = 0; k < num_slots; ++k) {
    const int expert = __shfl_sync(kAllLanes, slot.expert, k);
    const float addend = __shfl_sync(kAllLanes, value, k);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (Experts<kPerLane>::expert(i) == expert) sums.values[i] += addend;
    }
  }
}

template <int kPerLane>
__device__ void add_aux_gradient(const RouterConfig& config, const Experts<kPerLane>& scores,
                                 const float* slopes_E, Experts<kPerLane>& grad) {
  const float divisor = probability_divisor(config.score_function, scores);
  Experts<kPerLane> slopes;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int expert = Experts<kPerLane>::expert(i);
    slopes.values[i] = expert < static_cast<int>(config.num_experts) ? slopes_E[expert] : 0.0F;
  }
  float mean = 0.0F;
  if (config.score_function == ScoreFunction::sigmoid) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) mean += slopes.values[i] * (scores.values[i] / divisor);
    mean = warp_sum(mean);
  }
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) grad.values[i] += (slopes.values[i] - mean) / divisor;
}

/// In place: the gradient by the scores becomes the gradient by the logits.
template <int kPerLane>
__device__ void scores_backward(ScoreFunction function, const Experts<kPerLane>& scores,
                                Experts<kPerLane>& grad) {
  if (function == ScoreFunction::sigmoid) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      grad.values[i] *= scores.values[i] * (1.0F - scores.values[i]);
    }
    return;
  }
  float mean = 0.0F;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) mean += grad.values[i] * scores.values[i];
  mean = warp_sum(mean);
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) grad.values[i] = scores.values[i] * (grad.values[i] - mean);
}

/// `d_share` is scale * d_weight of this lane's slot, 0 where it is empty. slopes_E is null without
/// an auxiliary loss.
template <int kPerLane>
__device__ Experts<kPerLane> logit_gradient(const RouterConfig& config,
                                            const Experts<kPerLane>& scores, const Slot& slot,
                                            float d_share, const float* slopes_E, int num_slots) {
  const bool renormalised = config.weight_norm == WeightNorm::sum_to_one;
  const bool shares_bypass_scores = renormalised && config.score_function == ScoreFunction::softmax;
  const float share = share_of(config, slot, num_slots);
  const float mean = renormalised ? sum_slots(share * d_share, num_slots) : 0.0F;
  Experts<kPerLane> grad{};
  if (!shares_bypass_scores) {
    const float sum = renormalised ? sum_slots(slot.score, num_slots) + kScoreSumGuard : 1.0F;
    add_to_experts(slot, (d_share - mean) / sum, num_slots, grad);
  }
  if (slopes_E != nullptr) add_aux_gradient(config, scores, slopes_E, grad);
  scores_backward(config.score_function, scores, grad);
  if (shares_bypass_scores) {
    add_to_experts(slot, share * (d_share - mean), num_slots, grad);
  }
  return grad;
}

template <int kPerLane>
__device__ void token_backward(const RouterConfig& config, const RouterReads& reads,
                               std::int64_t token, const float* slopes_E,
                               const RowsOf<float>& d_logits_TE, const RouterScratch& scratch) {
  const int num_experts = static_cast<int>(config.num_experts);
  const int lane = device::lane_idx();
  Experts<kPerLane> logits;
  Experts<kPerLane> grad{};
  Slot slot;
  if (load_logits(reads, num_experts, token, logits) && load_ids(reads, num_experts, token, slot)) {
    const Experts<kPerLane> scores = scores_of(config.score_function, logits);
    gather(logits, scores, reads.num_slots, slot);
    const float d_weight = slot.expert >= 0 ? reads.d_weights_TK.row(token)[lane] : 0.0F;
    // Rounded on its own, as on the CPU: the gradient of a single share is then exactly 0, where a
    // contraction with what follows would leave the product's rounding error.
    const float d_share = __fmul_rn(config.scale, d_weight);
    grad = logit_gradient(config, scores, slot, d_share, slopes_E, reads.num_slots);
  } else {
    refuse(scratch, token);
  }
  float* d_logits_E = d_logits_TE.row(token);
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int expert = Experts<kPerLane>::expert(i);
    if (expert < num_experts) d_logits_E[expert] = grad.values[i];
  }
}

template <int kPerLane>
__global__ __launch_bounds__(kRouterThreads) void backward_kernel(const RouterConfig config,
                                                                  const RouterReads reads,
                                                                  const RowsOf<float> d_logits_TE,
                                                                  const RouterScratch scratch) {
  __shared__ float slopes_E[detail::kMaxCudaRouterExperts];
  const bool has_aux_loss = reads.load != nullptr;
  if (has_aux_loss && !load_aux_slopes(config, reads, slopes_E)) {
    if (blockIdx.x == 0 && device::warp_idx() == 0) refuse(scratch, kCallRefused);
    return;
  }
  for (std::int64_t token = blockIdx.x * std::int64_t{kRouterWarps} + device::warp_idx();
       token < reads.num_tokens; token += gridDim.x * std::int64_t{kRouterWarps}) {
    token_backward<kPerLane>(config, reads, token, has_aux_loss ? slopes_E : nullptr, d_logits_TE,
                             scratch);
  }
}

}  // namespace

void route_backward(const RouterConfig& config, const RouterReads& reads, RowsOf<float> d_logits_TE,
                    const RouterScratch& scratch, cudaStream_t stream) {
  if (reads.num_tokens == 0) return;
  const auto num_blocks = static_cast<unsigned>(
      std::min(kMaxBlocks, (reads.num_tokens + kRouterWarps - 1) / kRouterWarps));
  kernel_for(config.num_experts, &backward_kernel<4>, &backward_kernel<8>,
             &backward_kernel<16>)<<<num_blocks, kRouterThreads, 0, stream>>>(config, reads,
                                                                              d_logits_TE, scratch);
  check_launch("route_backward");
}

void load_backward_router_kernels() {
  load_kernel(reinterpret_cast<const void*>(&backward_kernel<4>));
  load_kernel(reinterpret_cast<const void*>(&backward_kernel<8>));
  load_kernel(reinterpret_cast<const void*>(&backward_kernel<16>));
}

}  // namespace megamoe::gpu
