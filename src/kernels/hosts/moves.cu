// Pulls and pushes of a range of experts: what exchange/pull.cu and push.cu do for all of a rank's.
#include "device/row_copy.cuh"
#include "kernels/exchange/pull_role.cuh"
#include "kernels/exchange/push_role.cuh"
#include "kernels/hosts/hosts.h"
#include "kernels/launch.h"

namespace megamoe::gpu {
namespace {

// ---- Pulls -----------------------------------------------------------------------------------

template <CallKind kKind>
__global__ __launch_bounds__(kMoverThreads) void pull_range_kernel(
    const __grid_constant__ RankView view, std::byte* plan, const ExpertRange experts,
    const PulledRows rows, const RowCut cut) {
  if (view.control()->call_failed != 0) return;
  const std::int64_t hidden = view.dims.hidden_dim;
  const SymmetricLayout& layout = view.symmetric.exchange;
  // Of tokens that need one of the experts first.
  const auto range_of = [&](int source, const PullLists& /*lists*/) {
    const std::int32_t* first_pull_e =
        view.first_pull_E(source) + view.routing().first_expert_of(view.rank);
    return PullRange{first_pull_e[experts.first], first_pull_e[experts.end]};
  };
  for_each_pull_of(view, cut.num_chunks, range_of, [&](const PullUnit& unit) {
    std::byte* base = view.symmetric_R[unit.source];
    note_rows(view, unit, rows);
    copy_chunk(cut, unit, row_of(layout.staged_rows_TH.in(base), unit.token, hidden), rows.x_CH,
               hidden);
    if constexpr (kKind == CallKind::backward) {
      copy_chunk(cut, unit, row_of(layout.staged_dy_TH.in(base), unit.token, hidden), rows.dy_CH,
                 hidden);
    }
  });
  clear_pads_of(view, plan, experts.first, experts.end, cut, rows);
  device::fence_async_global();  // products load rows through the copy engine
}

// ---- Pushes ----------------------------------------------------------------------------------

/// Rows [begin, end), with pads, whose origin has no rank.
struct PushBounds {
  int begin;
  int end;
};
__device__ PushBounds bounds_of(const RankView& view, std::byte* plan, const ExpertRange& experts) {
  const std::int64_t* expert_begin = view.plan_layout.expert_begin.in(plan);
  return {static_cast<int>(expert_begin[experts.first]),
          static_cast<int>(expert_begin[experts.end])};
}

__global__ __launch_bounds__(kMoverThreads) void push_rows_kernel(
    const __grid_constant__ RankView view, std::byte* plan, const ExpertRange experts,
    const bf16* rows_CH, const RowOrigin* origin_C, const RowCut cut) {
  if (view.control()->call_failed != 0) return;
  const PushBounds bounds = bounds_of(view, plan, experts);
  const int end = bounds.end * cut.num_chunks;
  for (int unit = bounds.begin * cut.num_chunks + global_warp(); unit < end;
       unit += num_global_warps()) {
    push_chunk(view, rows_CH, origin_C, cut, unit);
  }
}

__global__ __launch_bounds__(kMoverThreads) void push_dweights_kernel(
    const __grid_constant__ RankView view, std::byte* plan, const ExpertRange experts,
    const RowOrigin* origin_C, const DweightSegments segments) {
  if (view.control()->call_failed != 0) return;
  const PushBounds bounds = bounds_of(view, plan, experts);
  const int num_threads = static_cast<int>(gridDim.x) * kMoverThreads;
  for (int row = bounds.begin + static_cast<int>(blockIdx.x) * kMoverThreads +
                 static_cast<int>(threadIdx.x);
       row < bounds.end; row += num_threads) {
    push_dweight(view, origin_C, segments, row);
  }
}

int num_mover_blocks() { return num_multiprocessors() * kMoverBlocksAnSm; }

}  // namespace

void pull_rows_of(const RankView& view, std::byte* plan, const ExpertRange& experts,
                  const PulledRows& rows, cudaStream_t stream) {
  const auto kernel = rows.dy_CH == nullptr ? &pull_range_kernel<CallKind::forward>
                                            : &pull_range_kernel<CallKind::backward>;
  kernel<<<num_mover_blocks(), kMoverThreads, 0, stream>>>(view, plan, experts, rows,
                                                           RowCut(view.dims.hidden_dim));
  check_launch("pull_rows_of");
}

void push_rows_of(const RankView& view, std::byte* plan, const ExpertRange& experts,
                  const bf16* rows_CH, const RowOrigin* origin_C, const DweightSegments& dweights,
                  cudaStream_t stream) {
  push_rows_kernel<<<num_mover_blocks(), kMoverThreads, 0, stream>>>(
      view, plan, experts, rows_CH, origin_C, RowCut(view.dims.hidden_dim));
  check_launch("push_rows_of");
  if (dweights.data == nullptr) return;
  push_dweights_kernel<<<num_mover_blocks(), kMoverThreads, 0, stream>>>(view, plan, experts,
                                                                         origin_C, dweights);
  check_launch("push_dweights_of");
}

void load_moves_of_hosts_kernels() {
  load_kernel(reinterpret_cast<const void*>(&pull_range_kernel<CallKind::forward>));
  load_kernel(reinterpret_cast<const void*>(&pull_range_kernel<CallKind::backward>));
  load_kernel(reinterpret_cast<const void*>(&push_rows_kernel));
  load_kernel(reinterpret_cast<const void*>(&push_dweights_kernel));
}

}  // namespace megamoe::gpu
