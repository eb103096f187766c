// Pushing results: every row goes to the slot at its source that awaits it.
#include "kernels/exchange/push_role.cuh"
#include "kernels/launch.h"

namespace megamoe::gpu {
namespace {

/// Rows of this rank with their pads, whose origin has no rank.
__device__ int num_padded_rows(const RankView& view, std::byte* plan) {
  return static_cast<int>(
      view.plan_layout.expert_begin.in(plan)[view.routing().experts_per_rank()]);
}

__global__ __launch_bounds__(kMoverThreads) void push_rows_kernel(
    const __grid_constant__ RankView view, std::byte* plan, const bf16* rows_CH,
    const RowOrigin* origin_C, const RowCut cut) {
  if (view.control()->call_failed != 0) return;
  const int num_units = num_padded_rows(view, plan) * cut.num_chunks;
  for (int unit = global_warp(); unit < num_units; unit += num_global_warps()) {
    push_chunk(view, rows_CH, origin_C, cut, unit);
  }
}

__global__ __launch_bounds__(kMoverThreads) void push_dweights_kernel(
    const __grid_constant__ RankView view, std::byte* plan, const RowOrigin* origin_C,
    const DweightSegments segments) {
  if (view.control()->call_failed != 0) return;
  const int num_rows = num_padded_rows(view, plan);
  const int num_threads = static_cast<int>(gridDim.x) * kMoverThreads;
  for (int row = static_cast<int>(blockIdx.x) * kMoverThreads + static_cast<int>(threadIdx.x);
       row < num_rows; row += num_threads) {
    push_dweight(view, origin_C, segments, row);
  }
}

}  // namespace

void push_rows(const RankView& view, std::byte* plan, const bf16* rows_CH,
               const RowOrigin* origin_C, const DweightSegments& dweights, cudaStream_t stream) {
  const int num_blocks = num_multiprocessors() * kMoverBlocksAnSm;
  push_rows_kernel<<<num_blocks, kMoverThreads, 0, stream>>>(view, plan, rows_CH, origin_C,
                                                             RowCut(view.dims.hidden_dim));
  check_launch("push_rows");
  if (dweights.data != nullptr) push_dweights(view, plan, origin_C, dweights, stream);
}

void push_dweights(const RankView& view, std::byte* plan, const RowOrigin* origin_C,
                   const DweightSegments& dweights, cudaStream_t stream) {
  push_dweights_kernel<<<num_multiprocessors() * kMoverBlocksAnSm, kMoverThreads, 0, stream>>>(
      view, plan, origin_C, dweights);
  check_launch("push_dweights");
}

void load_push_kernels() {
  load_kernel(reinterpret_cast<const void*>(&push_rows_kernel));
  load_kernel(reinterpret_cast<const void*>(&push_dweights_kernel));
}

}  // namespace megamoe::gpu
