// From logits to ids and weights.
#include "kernels/launch.h"
#include "kernels/router/token.cuh"

namespace megamoe::gpu {
namespace {

/// Sum of the two highest values of one group (of the only one in a group of one).
template <int kPerLane>
__device__ float group_score(const Experts<kPerLane>& choice, int group, int group_size) {
  float first = masked();
  float second = masked();
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    if (Experts<kPerLane>::expert(i) / group_size != group) continue;
    second = fmaxf(second, fminf(first, choice.values[i]));
    first = fmaxf(first, choice.values[i]);
  }
  for (int distance = 16; distance > 0; distance /= 2) {
    const float other_first = __shfl_xor_sync(kAllLanes, first, distance);
    const float other_second = __shfl_xor_sync(kAllLanes, second, distance);
    second = fmaxf(fminf(first, other_first), fmaxf(second, other_second));
    first = fmaxf(first, other_first);
  }
  // Above the mask even where biases overflow together.
  return fmaxf(group_size == 1 ? first : first + second, -FLT_MAX);
}

/// Masks the experts of all but the best groups; lane g holds the score of group g.
template <int kPerLane>
__device__ void apply_group_limit(const RouterConfig& config, Experts<kPerLane>& choice) {
  const int num_groups = static_cast<int>(config.num_groups);
  const int group_size = static_cast<int>(config.num_experts) / num_groups;
  Experts<1> groups{{masked()}};
  for (int group = 0; group < num_groups; ++group) {
    const float score = group_score(choice, group, group_size);
    if (device::lane_idx() == group) groups.values[0] = score;
  }
  unsigned chosen = 0;
  for (int i = 0; i < static_cast<int>(config.top_groups); ++i) {
    const int group = highest(groups).expert;
    chosen |= 1U << group;
    if (device::lane_idx() == group) groups.values[0] = masked();
  }
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int group = Experts<kPerLane>::expert(i) / group_size;
    if (group < num_groups && (chosen >> group & 1U) == 0) choice.values[i] = masked();
  }
}

/// Scores plus biases; false in all lanes where a bias is not finite.
template <int kPerLane>
__device__ bool load_choice(const RouterConfig& config, const Experts<kPerLane>& scores,
                            const float* bias_E, Experts<kPerLane>& choice) {
  bool finite = true;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int expert = Experts<kPerLane>::expert(i);
    const bool exists = expert < static_cast<int>(config.num_experts);
    const float bias = exists && bias_E != nullptr ? bias_E[expert] : 0.0F;
    if (!is_finite(bias)) finite = false;
    choice.values[i] = exists ? scores.values[i] + bias : masked();
  }
  return __all_sync(kAllLanes, finite) != 0;
}

/// The slots' experts, by falling choice.
template <int kPerLane>
__device__ Slot select(const RouterConfig& config, Experts<kPerLane>& choice) {
  if (config.top_groups < config.num_groups) apply_group_limit(config, choice);
  Slot slot;
  for (int k = 0; k < static_cast<int>(config.top_k); ++k) {
    const int expert = highest(choice).expert;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (Experts<kPerLane>::expert(i) == expert) choice.values[i] = masked();
    }
    if (device::lane_idx() == k) slot.expert = expert;
  }
  return slot;
}

/// The token's slots; all are empty where it is refused. Returns what to refuse.
template <int kPerLane>
__device__ unsigned long long fill_slots(const RouterConfig& config, const RouterReads& reads,
                                         std::int64_t token, Slot& slot) {
  Experts<kPerLane> logits;
  if (!load_logits(reads, static_cast<int>(config.num_experts), token, logits)) return token;
  const Experts<kPerLane> scores = scores_of(config.score_function, logits);
  if (reads.ids_TK.data != nullptr) {
    if (!load_ids(reads, static_cast<int>(config.num_experts), token, slot)) return token;
  } else {
    Experts<kPerLane> choice;
    if (!load_choice(config, scores, reads.selection_bias_E, choice)) return kCallRefused;
    slot = select(config, choice);
  }
  gather(logits, scores, reads.num_slots, slot);
  return kNothingRefused;
}

template <int kPerLane>
__global__ __launch_bounds__(kRouterThreads) void route_kernel(const RouterConfig config,
                                                               const RouterReads reads,
                                                               const RowsOf<std::int32_t> ids_TK,
                                                               const RowsOf<float> weights_TK,
                                                               const RouterScratch scratch) {
  const std::int64_t token = blockIdx.x * std::int64_t{kRouterWarps} + device::warp_idx();
  if (token >= reads.num_tokens) return;
  Slot slot;
  const unsigned long long refused = fill_slots<kPerLane>(config, reads, token, slot);
  if (refused != kNothingRefused) refuse(scratch, refused);
  // After load_ids(): a token's ids may be replaced in place.
  const float share = share_of(config, slot, reads.num_slots);
  const int lane = device::lane_idx();
  if (lane >= reads.num_slots) return;
  ids_TK.row(token)[lane] = slot.expert;
  weights_TK.row(token)[lane] = config.scale * share;
}

}  // namespace

void route(const RouterConfig& config, const RouterReads& reads, RowsOf<std::int32_t> ids_TK,
           RowsOf<float> weights_TK, const RouterScratch& scratch, cudaStream_t stream) {
  if (reads.num_tokens == 0) return;
  const auto num_blocks =
      static_cast<unsigned>((reads.num_tokens + kRouterWarps - 1) / kRouterWarps);
  kernel_for(config.num_experts, &route_kernel<4>, &route_kernel<8>,
             &route_kernel<16>)<<<num_blocks, kRouterThreads, 0, stream>>>(config, reads, ids_TK,
                                                                           weights_TK, scratch);
  check_launch("route");
}

void load_forward_router_kernels() {
  load_kernel(reinterpret_cast<const void*>(&route_kernel<4>));
  load_kernel(reinterpret_cast<const void*>(&route_kernel<8>));
  load_kernel(reinterpret_cast<const void*>(&route_kernel<16>));
}

}  // namespace megamoe::gpu
