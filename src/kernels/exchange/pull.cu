// Pulling through registers: each warp reads a chunk of a token once and stores it to every row.
#include "device/row_copy.cuh"
#include "kernels/exchange/pull_role.cuh"
#include "kernels/hosts/hosts.h"
#include "kernels/launch.h"

namespace megamoe::gpu {
namespace {

__device__ void copy_chunk(const RowCut& cut, const PullUnit& unit, const Vector* from,
                           bf16* rows_CH, std::int64_t hidden) {
  ChunkInRegisters registers;
  load_chunk(cut, unit.chunk, from, registers);
  for (int i = 0; i < unit.num_rows; ++i) {
    const int row = __shfl_sync(0xffffffffU, unit.row, i);
    store_chunk(cut, unit.chunk, registers, row_of(rows_CH, row, hidden));
  }
}

template <CallKind kKind>
__device__ void pull_unit(const RankView& view, const RowCut& cut, const PullUnit& unit,
                          const PulledRows& rows) {
  const std::int64_t hidden = view.dims.hidden_dim;
  const SymmetricLayout& layout = view.symmetric.exchange;
  std::byte* base = view.symmetric_R[unit.source];
  note_rows(view, unit, rows);
  copy_chunk(cut, unit, row_of(layout.staged_rows_TH.in(base), unit.token, hidden), rows.x_CH,
             hidden);
  if constexpr (kKind == CallKind::backward) {
    copy_chunk(cut, unit, row_of(layout.staged_dy_TH.in(base), unit.token, hidden), rows.dy_CH,
               hidden);
  }
}

template <CallKind kKind>
__global__ __launch_bounds__(kMoverThreads) void pull_kernel(const __grid_constant__ RankView view,
                                                             std::byte* plan, const PulledRows rows,
                                                             const RowCut cut) {
  if (view.control()->call_failed != 0) return;
  for_each_pull(view, cut.num_chunks,
                [&](const PullUnit& unit) { pull_unit<kKind>(view, cut, unit, rows); });
  clear_pads(view, plan, cut, rows);
  device::fence_async_global();  // products load rows through the copy engine
}

template <CallKind kKind>
__global__ __launch_bounds__(kMoverThreads) void pull_range_kernel(
    const __grid_constant__ RankView view, std::byte* plan, const ExpertRange experts,
    const PulledRows rows, const RowCut cut) {
  if (view.control()->call_failed != 0) return;
  const int first = view.routing().first_expert_of(view.rank);
  const auto bounds_of = [&](int source) {
    const std::int32_t* first_pull_E = view.first_pull_E(source) + first;
    return PullBounds{first_pull_E[experts.first], first_pull_E[experts.end]};
  };
  for_each_pull_within(view, cut.num_chunks, bounds_of,
                       [&](const PullUnit& unit) { pull_unit<kKind>(view, cut, unit, rows); });
  clear_pads_of(view, plan, experts.first, experts.end, cut, rows);
  device::fence_async_global();
}

}  // namespace

void pull_rows(const RankView& view, std::byte* plan, const PulledRows& rows, cudaStream_t stream) {
  const auto kernel =
      rows.dy_CH == nullptr ? &pull_kernel<CallKind::forward> : &pull_kernel<CallKind::backward>;
  kernel<<<num_multiprocessors() * kMoverBlocksAnSm, kMoverThreads, 0, stream>>>(
      view, plan, rows, RowCut(view.dims.hidden_dim));
  check_launch("pull_rows");
}

void pull_rows_of(const RankView& view, std::byte* plan, const ExpertRange& experts,
                  const PulledRows& rows, cudaStream_t stream) {
  const auto kernel = rows.dy_CH == nullptr ? &pull_range_kernel<CallKind::forward>
                                            : &pull_range_kernel<CallKind::backward>;
  kernel<<<num_multiprocessors() * kMoverBlocksAnSm, kMoverThreads, 0, stream>>>(
      view, plan, experts, rows, RowCut(view.dims.hidden_dim));
  check_launch("pull_rows_of");
}

void load_pull_range_kernels() {
  load_kernel(reinterpret_cast<const void*>(&pull_range_kernel<CallKind::forward>));
  load_kernel(reinterpret_cast<const void*>(&pull_range_kernel<CallKind::backward>));
}

void load_pull_kernels() {
  load_kernel(reinterpret_cast<const void*>(&pull_kernel<CallKind::forward>));
  load_kernel(reinterpret_cast<const void*>(&pull_kernel<CallKind::backward>));
}

}  // namespace megamoe::gpu
