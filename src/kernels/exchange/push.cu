// Pushing results: every row goes to the slot at its source that awaits it.
#include "kernels/exchange/exchange.h"
#include "kernels/exchange/rows.cuh"
#include "kernels/hosts/hosts.h"
#include "kernels/launch.h"

namespace megamoe::gpu {
namespace {

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
ExpertRange all_experts(const RankView& view) { return {0, view.routing().experts_per_rank()}; }

void launch_push_dweights(const RankView& view, std::byte* plan, const ExpertRange& experts,
                          const RowOrigin* origin_C, const DweightSegments& dweights,
                          cudaStream_t stream) {
  push_dweights_kernel<<<num_mover_blocks(), kMoverThreads, 0, stream>>>(view, plan, experts,
                                                                         origin_C, dweights);
  check_launch("push_dweights");
}

}  // namespace

void push_rows(const RankView& view, std::byte* plan, const bf16* rows_CH,
               const RowOrigin* origin_C, const DweightSegments& dweights, cudaStream_t stream) {
  push_rows_of(view, plan, all_experts(view), rows_CH, origin_C, dweights, stream);
}

void push_dweights(const RankView& view, std::byte* plan, const RowOrigin* origin_C,
                   const DweightSegments& dweights, cudaStream_t stream) {
  launch_push_dweights(view, plan, all_experts(view), origin_C, dweights, stream);
}

void push_rows_of(const RankView& view, std::byte* plan, const ExpertRange& experts,
                  const bf16* rows_CH, const RowOrigin* origin_C, const DweightSegments& dweights,
                  cudaStream_t stream) {
  push_rows_kernel<<<num_mover_blocks(), kMoverThreads, 0, stream>>>(
      view, plan, experts, rows_CH, origin_C, RowCut(view.dims.hidden_dim));
  check_launch("push_rows");
  if (dweights.data != nullptr) {
    launch_push_dweights(view, plan, experts, origin_C, dweights, stream);
  }
}

void load_push_kernels() {
  load_kernel(reinterpret_cast<const void*>(&push_rows_kernel));
  load_kernel(reinterpret_cast<const void*>(&push_dweights_kernel));
}

}  // namespace megamoe::gpu
