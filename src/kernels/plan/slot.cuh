// One (token, slot) as the plan sees it, from the K ids of its token alone, and how the slots of a
// call are shared out to blocks and warps.
//
// Slots are numbered in the order of ids [T, K]. A block takes a contiguous range of them, a warp a
// contiguous part of that, a lane one slot of each window of 32: so ranks within an expert follow
// from counts before the block, before the warp, before the window and before the lane.
#pragma once

#include <cstdint>

#include "comm/gpu_workspace_layout.h"
#include "device/cluster.cuh"
#include "kernels/rank_view.h"

namespace megamoe::gpu {

inline constexpr int kPlanThreads = 256;
inline constexpr int kPlanWarps = kPlanThreads / device::kWarpSize;

/// Slots of each block; the last may have fewer.
struct SlotShares {
  std::int32_t num_slots;      ///< check_gpu_limits() keeps it below 2^31
  std::int32_t slots_a_block;  ///< a multiple of kPlanThreads
  std::int32_t num_blocks;
};

inline SlotShares share_slots(std::int64_t num_slots) {
  const std::int64_t a_block =
      round_up((num_slots + kMaxPlanBlocks - 1) / kMaxPlanBlocks, kPlanThreads);
  const std::int64_t num_blocks = num_slots == 0 ? 0 : (num_slots + a_block - 1) / a_block;
  return {static_cast<std::int32_t>(num_slots), static_cast<std::int32_t>(a_block),
          static_cast<std::int32_t>(num_blocks)};
}

/// Kernels are compiled for at most this many slots a token, which is what most models have, and
/// for kMaxSlots: the ids of a token lie in registers.
inline constexpr int kFewSlots = 8;

/// Calls body(slot_idx) for every slot of the calling warp; all lanes take part in every window,
/// with slot_idx >= num_slots where there is none.
template <class Body>
__device__ void for_each_window(const SlotShares& shares, Body body) {
  const int a_warp = shares.slots_a_block / kPlanWarps;
  const int begin =
      static_cast<int>(blockIdx.x) * shares.slots_a_block + device::warp_idx() * a_warp;
  for (int window = 0; window < a_warp; window += device::kWarpSize) {
    if (begin + window >= shares.num_slots) return;
    body(begin + window + device::lane_idx());
  }
}

/// Ids as the kernels read them: anything but an expert counts as an empty slot.
struct IdReader {
  const std::int32_t* ids;
  std::int64_t stride;
  std::int32_t num_experts;

  __device__ std::int32_t raw(int token, int slot) const { return ids[token * stride + slot]; }
  __device__ std::int32_t expert(int token, int slot) const {
    const std::int32_t id = raw(token, slot);
    return id >= 0 && id < num_experts ? id : -1;
  }
};

/// A set of ranks, in registers.
class RankSet {
 public:
  __device__ void add(int rank) {
    const std::uint64_t bit = std::uint64_t{1} << (rank % 64);
    low_ |= rank < 64 ? bit : 0;
    high_ |= rank < 64 ? 0 : bit;
  }
  __device__ bool has(int rank) const {
    return (((rank < 64 ? low_ : high_) >> (rank % 64)) & 1U) != 0;
  }

 private:
  static_assert(kMaxRanks <= 128);
  std::uint64_t low_ = 0;
  std::uint64_t high_ = 0;
};

struct SlotFacts {
  std::int32_t expert = -1;       ///< -1: empty
  bool is_pull = false;           ///< the first slot of its token for its destination
  std::int32_t first_expert = 0;  ///< the lowest expert of that destination that the token names
  std::int32_t num_slots = 0;     ///< of the token for that destination
  std::int32_t num_before = 0;    ///< slots of the token that precede it in the pull lists
  std::int32_t num_filled_before = 0;  ///< slots of the token before it in slot order
};

/// owner_E: the rank of each expert. All ids of the token, at most kSlots, are loaded before any is
/// used.
template <int kSlots>
__device__ SlotFacts describe_slot(const IdReader& reader, const std::uint8_t* owner_E, int top_k,
                                   int token, int slot) {
  std::int32_t experts[kSlots];
  int owners[kSlots];
#pragma unroll
  for (int i = 0; i < kSlots; ++i) experts[i] = i < top_k ? reader.expert(token, i) : -1;
#pragma unroll
  for (int i = 0; i < kSlots; ++i) owners[i] = experts[i] >= 0 ? owner_E[experts[i]] : -1;

  SlotFacts facts;
  facts.expert = reader.expert(token, slot);
  if (facts.expert < 0) return facts;
  const int owner = owner_E[facts.expert];
  facts.first_expert = facts.expert;
  RankSet before;  // destinations whose first slot comes before this slot's destination's
  bool seen_owner = false;
#pragma unroll
  for (int i = 0; i < kSlots; ++i) {
    if (owners[i] < 0) continue;
    if (i < slot) ++facts.num_filled_before;
    if (owners[i] == owner) {
      if (!seen_owner) facts.is_pull = i == slot;
      seen_owner = true;
      ++facts.num_slots;
      if (i < slot) ++facts.num_before;
      facts.first_expert = min(facts.first_expert, experts[i]);
    } else if (!seen_owner) {
      before.add(owners[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < kSlots; ++i) {
    if (owners[i] >= 0 && before.has(owners[i])) ++facts.num_before;
  }
  return facts;
}

/// Fills the table of owners; a CTA barrier follows.
__device__ inline void fill_owners(const RoutingDims& routing, std::uint8_t* owner_E) {
  for (int expert = static_cast<int>(threadIdx.x); expert < routing.num_experts;
       expert += static_cast<int>(blockDim.x)) {
    owner_E[expert] = static_cast<std::uint8_t>(routing.owner_of(expert));
  }
}

}  // namespace megamoe::gpu
