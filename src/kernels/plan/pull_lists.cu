// The tokens and slots of this rank's pull lists, in the order of routing/plan.h.
//
// Every warp numbers its slots in order, starting from what lies before it: a stable counting sort,
// so the result does not depend on timing.
#include "device/cluster.cuh"
#include "kernels/hosts/hosts.h"
#include "kernels/launch.h"
#include "kernels/plan/plan.h"
#include "kernels/plan/slot.cuh"

namespace megamoe::gpu {
namespace {

struct ListShared {
  /// First how many slots (or pulls) each warp has for an expert, then the next free place of them.
  std::int32_t rows[kPlanWarps][kMaxExperts];
  std::int32_t pulls[kPlanWarps][kMaxExperts];
  std::int32_t filled[kPlanWarps];  ///< slots of each warp that are not empty
  std::int32_t filled_before;       ///< slots of earlier blocks that are not empty
  std::uint8_t owner_E[kMaxExperts];
};

struct ListParams {
  IdReader ids;
  SlotShares shares;
};

template <int kSlots>
__device__ SlotFacts facts_of(const RankView& view, const ListParams& params,
                              const ListShared& shared, int slot_idx) {
  if (slot_idx >= params.shares.num_slots) return {};
  const int top_k = view.routing().top_k;
  return describe_slot<kSlots>(params.ids, shared.owner_E, top_k, slot_idx / top_k,
                               slot_idx % top_k);
}

__device__ void clear(const RankView& view, ListShared& shared) {
  fill_owners(view.routing(), shared.owner_E);
  for (int i = static_cast<int>(threadIdx.x); i < kPlanWarps * kMaxExperts; i += kPlanThreads) {
    shared.rows[i / kMaxExperts][i % kMaxExperts] = 0;
    shared.pulls[i / kMaxExperts][i % kMaxExperts] = 0;
  }
  if (threadIdx.x == 0) shared.filled_before = 0;
  __syncthreads();
}

template <int kSlots>
__device__ void count_by_warp(const RankView& view, const ListParams& params, ListShared& shared) {
  const int warp = device::warp_idx();
  std::int32_t num_filled = 0;
  for_each_window(params.shares, [&](int slot_idx) {
    const SlotFacts facts = facts_of<kSlots>(view, params, shared, slot_idx);
    num_filled += __popc(__ballot_sync(0xffffffffU, facts.expert >= 0));
    if (facts.expert >= 0) atomicAdd(&shared.rows[warp][facts.expert], 1);
    if (facts.is_pull) atomicAdd(&shared.pulls[warp][facts.first_expert], 1);
  });
  if (device::lane_idx() == 0) shared.filled[warp] = num_filled;
  static_assert(kMaxPlanBlocks <= kPlanThreads);
  if (threadIdx.x < blockIdx.x) {
    atomicAdd(&shared.filled_before,
              view.scratch_layout.block_slots_B.in(view.scratch)[threadIdx.x]);
  }
  __syncthreads();
}

__device__ void number_warps(std::int32_t (&counts)[kPlanWarps][kMaxExperts], int expert,
                             std::int32_t next) {
  for (auto& of_warp : counts) {
    const std::int32_t count = of_warp[expert];
    of_warp[expert] = next;
    next += count;
  }
}

/// Turns counts into first places.
__device__ void place_warps(const RankView& view, ListShared& shared) {
  const int num_experts = view.routing().num_experts;
  const std::int64_t block = static_cast<std::int64_t>(blockIdx.x) * num_experts;
  const PlanScratchLayout& layout = view.scratch_layout;
  for (int expert = static_cast<int>(threadIdx.x); expert < num_experts; expert += kPlanThreads) {
    number_warps(shared.rows, expert,
                 layout.first_row_E.in(view.scratch)[expert] +
                     layout.block_rows_BE.in(view.scratch)[block + expert]);
    number_warps(shared.pulls, expert,
                 layout.first_pull_E.in(view.scratch)[expert] +
                     layout.block_pulls_BE.in(view.scratch)[block + expert]);
  }
  __syncthreads();
}

/// The lanes with the same key get consecutive places from next[key], in lane order. All lanes of
/// the warp call it; those that take none get nothing of use.
__device__ std::int32_t take_place(std::int32_t* next, std::int32_t key, bool takes) {
  const unsigned same = __match_any_sync(0xffffffffU, takes ? key : -1);
  const int rank = __popc(same & ((1U << device::lane_idx()) - 1U));
  const std::int32_t first = takes ? next[key] : 0;
  __syncwarp();
  if (takes && rank == 0) next[key] = first + __popc(same);
  __syncwarp();
  return first + rank;
}

template <int kSlots>
__device__ void write_lists(const RankView& view, const ListParams& params, ListShared& shared) {
  const PullLists lists = view.pull_lists(view.rank);
  const int top_k = view.routing().top_k;
  const int warp = device::warp_idx();
  std::int32_t filled = shared.filled_before;
  for (int earlier = 0; earlier < warp; ++earlier) filled += shared.filled[earlier];
  for_each_window(params.shares, [&](int slot_idx) {
    const SlotFacts facts = facts_of<kSlots>(view, params, shared, slot_idx);
    const bool is_filled = facts.expert >= 0;
    const unsigned filled_lanes = __ballot_sync(0xffffffffU, is_filled);
    const std::int32_t row = take_place(shared.rows[warp], facts.expert, is_filled);
    const std::int32_t pull = take_place(shared.pulls[warp], facts.first_expert, facts.is_pull);
    const std::int32_t filled_before_token =
        filled + __popc(filled_lanes & ((1U << device::lane_idx()) - 1U)) - facts.num_filled_before;
    const std::int32_t place = filled_before_token + facts.num_before;
    if (is_filled) lists.slots[place] = {row, slot_idx % top_k, facts.expert};
    if (facts.is_pull) lists.tokens[pull] = {slot_idx / top_k, facts.num_slots, place};
    filled += __popc(filled_lanes);
  });
}

template <int kSlots>
__global__ __launch_bounds__(kPlanThreads) void list_kernel(const __grid_constant__ RankView view,
                                                            const ListParams params) {
  __shared__ ListShared shared;
  if (view.control()->call_failed != 0) return;
  clear(view, shared);
  count_by_warp<kSlots>(view, params, shared);
  place_warps(view, shared);
  write_lists<kSlots>(view, params, shared);
}

void launch(const RankView& view, const std::int32_t* ids_TK, std::int64_t num_tokens,
            cudaStream_t stream) {
  const int top_k = view.routing().top_k;
  const SlotShares shares = share_slots(num_tokens * top_k);
  if (shares.num_blocks == 0) return;
  const ListParams params{{ids_TK, top_k, view.routing().num_experts}, shares};
  const auto kernel = top_k <= kFewSlots ? &list_kernel<kFewSlots> : &list_kernel<kMaxSlots>;
  kernel<<<shares.num_blocks, kPlanThreads, 0, stream>>>(view, params);
  check_launch("write_pull_lists");
}

}  // namespace

void write_pull_lists(const RankView& view, std::byte* plan, std::int64_t num_tokens,
                      cudaStream_t stream) {
  launch(view, view.plan_layout.ids_TK.in(plan), num_tokens, stream);
}

void write_relayed_lists(const RankView& source, const std::int32_t* ids_TK,
                         std::int64_t num_tokens, cudaStream_t stream) {
  launch(source, ids_TK, num_tokens, stream);
}

void load_list_kernels() {
  load_kernel(reinterpret_cast<const void*>(&list_kernel<kFewSlots>));
  load_kernel(reinterpret_cast<const void*>(&list_kernel<kMaxSlots>));
}

}  // namespace megamoe::gpu
