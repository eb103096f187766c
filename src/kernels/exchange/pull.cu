// Pulling through registers: each warp reads a chunk of a token once and stores it to every row.
#include "device/row_copy.cuh"
#include "kernels/exchange/pull_role.cuh"
#include "kernels/launch.h"

namespace megamoe::gpu {
namespace {

template <CallKind kKind>
__global__ __launch_bounds__(kMoverThreads) void pull_kernel(const __grid_constant__ RankView view,
                                                             std::byte* plan, const PulledRows rows,
                                                             const RowCut cut) {
  if (view.control()->call_failed != 0) return;
  const std::int64_t hidden = view.dims.hidden_dim;
  const SymmetricLayout& layout = view.symmetric.exchange;
  for_each_pull(view, cut.num_chunks, [&](const PullUnit& unit) {
    std::byte* base = view.symmetric_R[unit.source];
    note_rows(view, unit, rows);
    copy_chunk(cut, unit, row_of(layout.staged_rows_TH.in(base), unit.token, hidden), rows.x_CH,
               hidden);
    if constexpr (kKind == CallKind::backward) {
      copy_chunk(cut, unit, row_of(layout.staged_dy_TH.in(base), unit.token, hidden), rows.dy_CH,
                 hidden);
    }
  });
  clear_pads(view, plan, cut, rows);
  device::fence_async_global();  // products load rows through the copy engine
}

}  // namespace

void pull_rows(const RankView& view, std::byte* plan, const PulledRows& rows, cudaStream_t stream) {
  const auto kernel =
      rows.dy_CH == nullptr ? &pull_kernel<CallKind::forward> : &pull_kernel<CallKind::backward>;
  kernel<<<num_multiprocessors() * kMoverBlocksAnSm, kMoverThreads, 0, stream>>>(
      view, plan, rows, RowCut(view.dims.hidden_dim));
  check_launch("pull_rows");
}

void load_pull_kernels() {
  load_kernel(reinterpret_cast<const void*>(&pull_kernel<CallKind::forward>));
  load_kernel(reinterpret_cast<const void*>(&pull_kernel<CallKind::backward>));
}

}  // namespace megamoe::gpu
