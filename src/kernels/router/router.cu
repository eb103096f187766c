// A warp routes a token: lane l holds experts l, l + 32, ... in registers.
#include <cfloat>
#include <string>

#include "device/cluster.cuh"
#include "kernels/launch.h"
#include "kernels/rank_view.h"
#include "kernels/router/router.h"
#include "megamoe/error.h"

namespace megamoe::gpu {
namespace {

constexpr unsigned kAllLanes = 0xffffffffU;
constexpr int kRouterThreads = 256;
constexpr int kMaxGroups = device::kWarpSize;
constexpr float kScoreSumGuard = 1e-20F;
static_assert(kMaxSlots <= device::kWarpSize);

__device__ float masked() { return -INFINITY; }

__device__ float warp_max(float value) {
  for (int distance = 16; distance > 0; distance /= 2) {
    value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, distance));
  }
  return value;
}
__device__ float warp_sum(float value) {
  for (int distance = 16; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, distance);
  }
  return value;
}

/// One value of each of the token's experts; those beyond E hold -infinity.
template <int kPerLane>
struct Experts {
  float values[kPerLane];

  __device__ static int expert(int i) { return i * device::kWarpSize + device::lane_idx(); }
};

struct Best {
  float value;
  int expert;
};

/// The highest value, ties to the lower expert.
template <int kPerLane>
__device__ Best highest(const Experts<kPerLane>& choice) {
  Best best{choice.values[0], Experts<kPerLane>::expert(0)};
#pragma unroll
  for (int i = 1; i < kPerLane; ++i) {
    if (choice.values[i] > best.value) best = {choice.values[i], Experts<kPerLane>::expert(i)};
  }
  for (int distance = 16; distance > 0; distance /= 2) {
    const float value = __shfl_xor_sync(kAllLanes, best.value, distance);
    const int expert = __shfl_xor_sync(kAllLanes, best.expert, distance);
    if (value > best.value || (value == best.value && expert < best.expert)) best = {value, expert};
  }
  return best;
}

template <int kPerLane>
__device__ Experts<kPerLane> scores_of(const RouterConfig& config,
                                       const Experts<kPerLane>& logits) {
  Experts<kPerLane> scores;
  if (config.score_function == ScoreFunction::sigmoid) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const float tail = expf(-fabsf(logits.values[i]));
      scores.values[i] = (logits.values[i] >= 0.0F ? 1.0F : tail) / (1.0F + tail);
    }
    return scores;
  }
  float top = masked();
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) top = fmaxf(top, logits.values[i]);
  top = warp_max(top);
  float sum = 0.0F;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    scores.values[i] = expf(logits.values[i] - top);
    sum += scores.values[i];
  }
  sum = warp_sum(sum);
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) scores.values[i] /= sum;
  return scores;
}

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

/// Slot k of the token, in lane k.
struct Slot {
  int expert = -1;
  float logit = 0.0F;
  float score = 0.0F;
};

template <int kPerLane>
__device__ Slot select(const RouterConfig& config, const Experts<kPerLane>& logits,
                       const Experts<kPerLane>& scores, const float* bias_E) {
  Experts<kPerLane> choice;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int expert = Experts<kPerLane>::expert(i);
    const bool exists = expert < static_cast<int>(config.num_experts);
    const float bias = exists && bias_E != nullptr ? bias_E[expert] : 0.0F;
    choice.values[i] = exists ? scores.values[i] + bias : masked();
  }
  if (config.top_groups < config.num_groups) apply_group_limit(config, choice);
  Slot slot;
  for (int k = 0; k < static_cast<int>(config.top_k); ++k) {
    const int expert = highest(choice).expert;
    float logit = 0.0F;
    float score = 0.0F;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (Experts<kPerLane>::expert(i) != expert) continue;
      choice.values[i] = masked();
      logit = logits.values[i];
      score = scores.values[i];
    }
    logit = __shfl_sync(kAllLanes, logit, expert % device::kWarpSize);
    score = __shfl_sync(kAllLanes, score, expert % device::kWarpSize);
    if (device::lane_idx() == k) slot = {expert, logit, score};
  }
  return slot;
}

/// The sum over slots, in slot order.
__device__ float sum_slots(float value, int num_slots) {
  float sum = 0.0F;
  for (int k = 0; k < num_slots; ++k) sum += __shfl_sync(kAllLanes, value, k);
  return sum;
}

/// This lane's weight before the scale.
__device__ float share_of(const RouterConfig& config, const Slot& slot) {
  if (config.weight_norm == WeightNorm::none) return slot.score;
  const int num_slots = static_cast<int>(config.top_k);
  if (config.score_function == ScoreFunction::sigmoid) {
    return slot.score / (sum_slots(slot.score, num_slots) + kScoreSumGuard);
  }
  const float top = warp_max(slot.expert >= 0 ? slot.logit : masked());
  const float share = expf(slot.logit - top);
  return share / sum_slots(share, num_slots);
}

/// Loads a token's logits; false in all lanes where one is not finite.
template <int kPerLane>
__device__ bool load_logits(const RouterConfig& config, const float* logits_E,
                            Experts<kPerLane>& logits) {
  bool finite = true;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int expert = Experts<kPerLane>::expert(i);
    const bool exists = expert < static_cast<int>(config.num_experts);
    logits.values[i] = exists ? logits_E[expert] : masked();
    if (exists && !(fabsf(logits.values[i]) <= FLT_MAX)) finite = false;
  }
  return __all_sync(kAllLanes, finite) != 0;
}

template <int kPerLane>
__global__ __launch_bounds__(kRouterThreads) void route_kernel(const RouterConfig config,
                                                               const RouterTensors tensors,
                                                               std::int64_t num_tokens) {
  const std::int64_t token =
      blockIdx.x * std::int64_t{kRouterThreads / device::kWarpSize} + device::warp_idx();
  if (token >= num_tokens) return;
  const int lane = device::lane_idx();
  const int num_slots = static_cast<int>(config.top_k);
  Experts<kPerLane> logits;
  Slot slot;
  float share = 0.0F;
  if (load_logits(config, tensors.logits_TE + token * tensors.logit_stride, logits)) {
    const Experts<kPerLane> scores = scores_of(config, logits);
    slot = select(config, logits, scores, tensors.selection_bias_E);
    share = share_of(config, slot);
    if (tensors.scores_TE != nullptr) {
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        const int expert = Experts<kPerLane>::expert(i);
        if (expert < static_cast<int>(config.num_experts)) {
          tensors.scores_TE[token * config.num_experts + expert] = scores.values[i];
        }
      }
    }
  } else if (lane == 0) {
    atomicMin(tensors.first_bad_token, static_cast<unsigned long long>(token));
  }
  if (lane >= num_slots) return;
  tensors.ids_TK[token * tensors.id_stride + lane] = slot.expert;
  tensors.weights_TK[token * tensors.weight_stride + lane] = config.scale * share;
  if (tensors.shares_TK != nullptr) tensors.shares_TK[token * num_slots + lane] = share;
}

using RouteKernel = void (*)(RouterConfig, RouterTensors, std::int64_t);

RouteKernel kernel_for(std::int64_t num_experts) {
  if (num_experts <= 4 * device::kWarpSize) return &route_kernel<4>;
  if (num_experts <= 8 * device::kWarpSize) return &route_kernel<8>;
  static_assert(kMaxExperts <= 16 * device::kWarpSize);
  return &route_kernel<16>;
}

void check_supported(const RouterConfig& config) {
  const auto require = [](bool holds, const char* what, std::int64_t most) {
    if (holds) return;
    throw Error(ErrorCode::unsupported,
                "CUDA router: " + std::string(what) + " must be at most " + std::to_string(most));
  };
  require(config.num_experts <= kMaxExperts, "num_experts", kMaxExperts);
  require(config.top_k <= kMaxSlots, "top_k", kMaxSlots);
  require(config.num_groups <= kMaxGroups, "num_groups", kMaxGroups);
}

}  // namespace

void route(const RouterConfig& config, const RouterTensors& tensors, std::int64_t num_tokens,
           cudaStream_t stream) {
  check_supported(config);
  if (num_tokens == 0) return;
  constexpr std::int64_t kTokensABlock = kRouterThreads / device::kWarpSize;
  const auto num_blocks = static_cast<unsigned>((num_tokens + kTokensABlock - 1) / kTokensABlock);
  kernel_for(config.num_experts)<<<num_blocks, kRouterThreads, 0, stream>>>(config, tensors,
                                                                            num_tokens);
  check_launch("route");
}

}  // namespace megamoe::gpu
