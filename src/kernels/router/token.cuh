// A warp works on a token: lane l holds experts l, l + 32, ... in registers, lane k slot k.
#pragma once

#include <cfloat>
#include <cstdint>

#include "device/cluster.cuh"
#include "kernels/router/router.h"
#include "routing/cuda_router_check.h"

namespace megamoe::gpu {

inline constexpr unsigned kAllLanes = 0xffffffffU;
inline constexpr int kRouterThreads = 256;
inline constexpr int kRouterWarps = kRouterThreads / device::kWarpSize;
inline constexpr float kScoreSumGuard = 1e-20F;
static_assert(detail::kMaxCudaRouterSlots <= device::kWarpSize);
static_assert(detail::kMaxCudaRouterGroups <= device::kWarpSize);

__device__ inline float masked() { return -INFINITY; }
__device__ inline bool is_finite(float value) { return fabsf(value) <= FLT_MAX; }

__device__ inline float warp_max(float value) {
  for (int distance = 16; distance > 0; distance /= 2) {
    value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, distance));
  }
  return value;
}
/// A tree whose order does not depend on the lane: all lanes get the same bits.
template <class T>
__device__ T warp_sum(T value) {
  for (int distance = 16; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, distance);
  }
  return value;
}

/// One value of each of the token's experts; logits and choices beyond E are -infinity.
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
__device__ Experts<kPerLane> scores_of(ScoreFunction function, const Experts<kPerLane>& logits) {
  Experts<kPerLane> scores;
  if (function == ScoreFunction::sigmoid) {
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

/// Scores are turned into the probabilities of P_j by this divisor.
template <int kPerLane>
__device__ float probability_divisor(ScoreFunction function, const Experts<kPerLane>& scores) {
  if (function == ScoreFunction::softmax) return 1.0F;
  float sum = 0.0F;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) sum += scores.values[i];
  return warp_sum(sum) + kScoreSumGuard;
}

__device__ inline float logit_at(const RouterReads& reads, std::int64_t token, int expert) {
  const std::int64_t index = token * reads.logit_stride + expert;
  return reads.logit_dtype == DType::bf16
             ? to_float(static_cast<const bf16*>(reads.logits_TE)[index])
             : static_cast<const float*>(reads.logits_TE)[index];
}

/// Loads a token's logits; false in all lanes where one is not finite.
template <int kPerLane>
__device__ bool load_logits(const RouterReads& reads, int num_experts, std::int64_t token,
                            Experts<kPerLane>& logits) {
  bool finite = true;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int expert = Experts<kPerLane>::expert(i);
    const bool exists = expert < num_experts;
    logits.values[i] = exists ? logit_at(reads, token, expert) : masked();
    if (exists && !is_finite(logits.values[i])) finite = false;
  }
  return __all_sync(kAllLanes, finite) != 0;
}

/// Slot k of the token, in lane k; lanes without a slot and empty slots hold this.
struct Slot {
  int expert = -1;
  float logit = 0.0F;
  float score = 0.0F;
};

/// Loads a token's ids into their lanes; false in all lanes, and all slots empty, where one is out
/// of range.
__device__ inline bool load_ids(const RouterReads& reads, int num_experts, std::int64_t token,
                                Slot& slot) {
  const int lane = device::lane_idx();
  const int expert = lane < reads.num_slots ? reads.ids_TK.row(token)[lane] : -1;
  const bool in_range = expert >= -1 && expert < num_experts;
  if (__all_sync(kAllLanes, in_range) == 0) return false;
  slot.expert = expert;
  return true;
}

/// Logits and scores of the slots' experts.
template <int kPerLane>
__device__ void gather(const Experts<kPerLane>& logits, const Experts<kPerLane>& scores,
                       int num_slots, Slot& slot) {
  for (int k = 0; k < num_slots; ++k) {
    const int expert = __shfl_sync(kAllLanes, slot.expert, k);
    float logit = 0.0F;
    float score = 0.0F;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (Experts<kPerLane>::expert(i) != expert) continue;
      logit = logits.values[i];
      score = scores.values[i];
    }
    // The remainder of -1 is negative; lane 31 then holds zeros, as every lane does.
    logit = __shfl_sync(kAllLanes, logit, expert & (device::kWarpSize - 1));
    score = __shfl_sync(kAllLanes, score, expert & (device::kWarpSize - 1));
    if (device::lane_idx() == k) {
      slot.logit = logit;
      slot.score = score;
    }
  }
}

/// The sum over slots, in slot order.
__device__ inline float sum_slots(float value, int num_slots) {
  float sum = 0.0F;
  for (int k = 0; k < num_slots; ++k) sum += __shfl_sync(kAllLanes, value, k);
  return sum;
}

/// This lane's weight before the scale; exactly 0 for an empty slot.
__device__ inline float share_of(const RouterConfig& config, const Slot& slot, int num_slots) {
  if (config.weight_norm == WeightNorm::none) return slot.score;
  if (config.score_function == ScoreFunction::sigmoid) {
    return slot.score / (sum_slots(slot.score, num_slots) + kScoreSumGuard);
  }
  // From the logits: scores of unlikely experts underflow.
  const bool occupied = slot.expert >= 0;
  const float top = warp_max(occupied ? slot.logit : masked());
  const float share = occupied ? expf(slot.logit - top) : 0.0F;
  const float sum = sum_slots(share, num_slots);
  return occupied ? share / sum : 0.0F;
}

__device__ inline void refuse(const RouterScratch& scratch, unsigned long long what) {
  if (device::lane_idx() == 0) atomicMin(scratch.refused, what);
}

/// A kernel by how many experts a lane holds.
template <class Kernel>
Kernel kernel_for(std::int64_t num_experts, Kernel of_4, Kernel of_8, Kernel of_16) {
  static_assert(detail::kMaxCudaRouterExperts <= 16 * device::kWarpSize);
  if (num_experts <= 4 * device::kWarpSize) return of_4;
  return num_experts <= 8 * device::kWarpSize ? of_8 : of_16;
}

}  // namespace megamoe::gpu
