// Pulls and pushes of a range of experts: what exchange/pull.cu and push.cu do for all of a rank's.
#include "device/row_copy.cuh"
#include "kernels/exchange/pull_role.cuh"
#include "kernels/hosts/hosts.h"
#include "kernels/launch.h"

namespace megamoe::gpu {
namespace {

// ---- Pulls -----------------------------------------------------------------------------------

/// Calls body(unit) for the warp's share of the pulls of tokens that need one of `experts` first:
/// own tokens first, then the next rank's, so that not all ranks read from the same one.
template <class Body>
__device__ void for_each_pull_of(const RankView& view, const ExpertRange& experts, int num_chunks,
                                 Body body) {
  const int num_ranks = view.routing().num_ranks;
  const int first = view.routing().first_expert_of(view.rank);
  int next = global_warp();
  for (int step = 0; step < num_ranks; ++step) {
    const int source = (view.rank + step) % num_ranks;
    const PullLists lists = view.pull_lists(source);
    const std::int32_t* first_pull_E = view.first_pull_E(source) + first;
    const std::int64_t begin = first_pull_E[experts.first];
    const int num_units = static_cast<int>(first_pull_E[experts.end] - begin) * num_chunks;
    for (; next < num_units; next += num_global_warps()) {
      const PullToken pull = lists.tokens[begin + next / num_chunks];
      PullUnit unit{source, pull.token, pull.num_slots, next % num_chunks, 0, 0};
      if (device::lane_idx() < pull.num_slots) {
        const PullSlot slot = lists.slots[pull.first_slot + device::lane_idx()];
        unit.row = static_cast<std::int32_t>(slot.row);
        unit.slot = slot.slot;
      }
      body(unit);
    }
    next -= num_units;
  }
}

__device__ void copy_chunk(const RowCut& cut, const PullUnit& unit, const Vector* from,
                           bf16* rows_CH, std::int64_t hidden) {
  ChunkInRegisters registers;
  load_chunk(cut, unit.chunk, from, registers);
  for (int i = 0; i < unit.num_rows; ++i) {
    const int row = __shfl_sync(0xffffffffU, unit.row, i);
    store_chunk(cut, unit.chunk, registers, row_of(rows_CH, row, hidden));
  }
}

/// Rows behind those of each of `experts`, up to the next expert's: weight gradients multiply them.
__device__ void clear_pads_of(const RankView& view, std::byte* plan, const ExpertRange& experts,
                              const RowCut& cut, const PulledRows& rows) {
  const std::int64_t* expert_begin = view.plan_layout.expert_begin.in(plan);
  const std::int32_t* count_e = view.plan_layout.group_count_e.in(plan);
  const int num_units = (experts.end - experts.first) * static_cast<int>(kGpuRowAlignment);
  for (int unit = global_warp(); unit < num_units; unit += num_global_warps()) {
    const int expert = experts.first + unit / static_cast<int>(kGpuRowAlignment);
    const std::int64_t row = expert_begin[expert] + count_e[expert] + unit % kGpuRowAlignment;
    if (row >= expert_begin[expert + 1]) continue;
    zero_row(cut, row_of(rows.x_CH, row, view.dims.hidden_dim));
    if (rows.dy_CH != nullptr) zero_row(cut, row_of(rows.dy_CH, row, view.dims.hidden_dim));
    if (device::lane_idx() != 0) continue;
    rows.origin_C[row] = {-1, 0, 0};
    if (rows.weight_C != nullptr) rows.weight_C[row] = 0.0F;
  }
}

template <CallKind kKind>
__global__ __launch_bounds__(kMoverThreads) void pull_range_kernel(
    const __grid_constant__ RankView view, std::byte* plan, const ExpertRange experts,
    const PulledRows rows, const RowCut cut) {
  if (view.control()->call_failed != 0) return;
  const std::int64_t hidden = view.dims.hidden_dim;
  const SymmetricLayout& layout = view.symmetric.exchange;
  for_each_pull_of(view, experts, cut.num_chunks, [&](const PullUnit& unit) {
    std::byte* base = view.symmetric_R[unit.source];
    note_rows(view, unit, rows);
    copy_chunk(cut, unit, row_of(layout.staged_rows_TH.in(base), unit.token, hidden), rows.x_CH,
               hidden);
    if constexpr (kKind == CallKind::backward) {
      copy_chunk(cut, unit, row_of(layout.staged_dy_TH.in(base), unit.token, hidden), rows.dy_CH,
                 hidden);
    }
  });
  clear_pads_of(view, plan, experts, cut, rows);
  device::fence_async_global();  // products load rows through the copy engine
}

// ---- Pushes ----------------------------------------------------------------------------------

__device__ std::int64_t slot_of(const RankView& view, const RowOrigin& origin) {
  return static_cast<std::int64_t>(origin.token) * view.routing().top_k + origin.slot;
}

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
  const std::int64_t hidden = view.dims.hidden_dim;
  const PushBounds bounds = bounds_of(view, plan, experts);
  const int end = bounds.end * cut.num_chunks;
  for (int unit = bounds.begin * cut.num_chunks + global_warp(); unit < end;
       unit += num_global_warps()) {
    const int row = unit / cut.num_chunks;
    const int chunk = unit % cut.num_chunks;
    const RowOrigin origin = origin_C[row];
    if (origin.rank < 0) continue;
    bf16* slots_TKH = view.symmetric.exchange.slot_rows_TKH.in(view.symmetric_R[origin.rank]);
    ChunkInRegisters registers;
    load_chunk(cut, chunk, row_of(rows_CH, row, hidden), registers);
    store_chunk(cut, chunk, registers, row_of(slots_TKH, slot_of(view, origin), hidden));
  }
}

/// dw of every row: its segments in order.
__global__ __launch_bounds__(kMoverThreads) void push_dweights_kernel(
    const __grid_constant__ RankView view, std::byte* plan, const ExpertRange experts,
    const RowOrigin* origin_C, const DweightSegments segments) {
  if (view.control()->call_failed != 0) return;
  const PushBounds bounds = bounds_of(view, plan, experts);
  const int num_threads = static_cast<int>(gridDim.x) * kMoverThreads;
  for (int row = bounds.begin + static_cast<int>(blockIdx.x) * kMoverThreads +
                 static_cast<int>(threadIdx.x);
       row < bounds.end; row += num_threads) {
    const RowOrigin origin = origin_C[row];
    if (origin.rank < 0) continue;
    float sum = segments.data[row];
    for (int segment = 1; segment < segments.num_segments; ++segment) {
      sum += segments.data[segment * segments.row_stride + row];
    }
    view.symmetric.exchange.slot_dweights_TK.in(
        view.symmetric_R[origin.rank])[slot_of(view, origin)] = sum;
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
