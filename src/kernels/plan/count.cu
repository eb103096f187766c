// How many slots and how many fetched tokens each block has for each expert.
#include "device/cluster.cuh"
#include "kernels/hosts/hosts.h"
#include "kernels/launch.h"
#include "kernels/plan/plan.h"
#include "kernels/plan/slot.cuh"

namespace megamoe::gpu {
namespace {

struct CountParams {
  IdReader input;
  const float* weights;  ///< null: ids and weights lie in the plan already
  std::int64_t weight_stride;
  SlotShares shares;
  std::byte* plan;
};

template <int kSlots>
__global__ __launch_bounds__(kPlanThreads) void count_kernel(const __grid_constant__ RankView view,
                                                             CountParams params) {
  __shared__ std::int32_t rows_E[kMaxExperts];
  __shared__ std::int32_t pulls_E[kMaxExperts];
  __shared__ std::uint8_t owner_E[kMaxExperts];
  __shared__ std::int32_t num_filled;
  const RoutingDims& routing = view.routing();
  const int num_experts = routing.num_experts;
  fill_owners(routing, owner_E);
  for (int expert = static_cast<int>(threadIdx.x); expert < num_experts; expert += kPlanThreads) {
    rows_E[expert] = 0;
    pulls_E[expert] = 0;
  }
  if (threadIdx.x == 0) num_filled = 0;
  __syncthreads();

  for_each_window(params.shares, [&](int slot_idx) {
    if (slot_idx >= params.shares.num_slots) return;
    const int token = slot_idx / routing.top_k;
    const int slot = slot_idx % routing.top_k;
    const SlotFacts facts =
        describe_slot<kSlots>(params.input, owner_E, routing.top_k, token, slot);
    const std::int32_t id = params.input.raw(token, slot);
    if (params.weights != nullptr) {
      view.plan_layout.ids_TK.in(params.plan)[slot_idx] = id;
      view.plan_layout.weights_TK.in(params.plan)[slot_idx] =
          params.weights[token * params.weight_stride + slot];
    }
    if (facts.expert >= 0) {
      atomicAdd(&rows_E[facts.expert], 1);
      atomicAdd(&num_filled, 1);
      if (facts.is_pull) atomicAdd(&pulls_E[facts.first_expert], 1);
    } else if (id != -1) {
      atomicMin(reinterpret_cast<unsigned long long*>(&view.control()->first_bad_slot),
                static_cast<unsigned long long>(slot_idx));
    }
  });
  __syncthreads();

  const std::int64_t base = static_cast<std::int64_t>(blockIdx.x) * num_experts;
  for (int expert = static_cast<int>(threadIdx.x); expert < num_experts; expert += kPlanThreads) {
    view.scratch_layout.block_rows_BE.in(view.scratch)[base + expert] = rows_E[expert];
    view.scratch_layout.block_pulls_BE.in(view.scratch)[base + expert] = pulls_E[expert];
  }
  if (threadIdx.x == 0) {
    view.scratch_layout.block_slots_B.in(view.scratch)[blockIdx.x] = num_filled;
  }
}

void launch(const RankView& view, const CountParams& params, cudaStream_t stream) {
  if (params.shares.num_blocks == 0) return;
  const auto kernel =
      view.routing().top_k <= kFewSlots ? &count_kernel<kFewSlots> : &count_kernel<kMaxSlots>;
  kernel<<<params.shares.num_blocks, kPlanThreads, 0, stream>>>(view, params);
  check_launch("count_slots");
}

}  // namespace

void count_slots(const RankView& view, std::byte* plan, const RoutingInput& input,
                 std::int64_t num_tokens, cudaStream_t stream) {
  check_num_tokens(view, num_tokens);
  launch(view,
         {{input.ids, input.id_stride, view.routing().num_experts},
          input.weights,
          input.weight_stride,
          share_slots(num_tokens * view.routing().top_k),
          plan},
         stream);
}

void count_planned_slots(const RankView& view, std::byte* plan, std::int64_t num_tokens,
                         cudaStream_t stream) {
  launch(view,
         {{view.plan_layout.ids_TK.in(plan), view.routing().top_k, view.routing().num_experts},
          nullptr,
          0,
          share_slots(num_tokens * view.routing().top_k),
          plan},
         stream);
}

void count_relayed_slots(const RankView& source, const std::int32_t* ids_TK,
                         std::int64_t num_tokens, cudaStream_t stream) {
  const RoutingDims& routing = source.routing();
  launch(source,
         {{ids_TK, routing.top_k, routing.num_experts},
          nullptr,
          0,
          share_slots(num_tokens * routing.top_k),
          nullptr},
         stream);
}

void load_count_kernels() {
  load_kernel(reinterpret_cast<const void*>(&count_kernel<kFewSlots>));
  load_kernel(reinterpret_cast<const void*>(&count_kernel<kMaxSlots>));
}

}  // namespace megamoe::gpu
