// Staging: this rank's rows go to where peers pull them from.
#include "device/row_copy.cuh"
#include "kernels/exchange/exchange.h"
#include "kernels/exchange/rows.cuh"
#include "kernels/launch.h"

namespace megamoe::gpu {
namespace {

struct StageParams {
  RowsInput x;
  RowsInput dy;          ///< absent in a forward call
  const float* weights;  ///< [T, K]; absent in a forward call
  std::int32_t num_tokens;
};

__global__ __launch_bounds__(kMoverThreads) void stage_kernel(const __grid_constant__ RankView view,
                                                              const StageParams params,
                                                              const RowCut cut) {
  // A peer may still read what was staged for the call that failed.
  if (view.control()->failed_for_good != 0) return;
  std::byte* base = view.symmetric_R[view.rank];
  const SymmetricLayout& layout = view.symmetric.exchange;
  const std::int64_t hidden = view.dims.hidden_dim;
  const int num_units = params.num_tokens * cut.num_chunks;
  for (int unit = global_warp(); unit < num_units; unit += num_global_warps()) {
    const int token = unit / cut.num_chunks;
    const int chunk = unit % cut.num_chunks;
    ChunkInRegisters registers;
    load_chunk(cut, chunk, row_of(params.x.data, token, params.x.stride), registers);
    store_chunk(cut, chunk, registers, row_of(layout.staged_rows_TH.in(base), token, hidden));
    if (params.dy.data == nullptr) continue;
    load_chunk(cut, chunk, row_of(params.dy.data, token, params.dy.stride), registers);
    store_chunk(cut, chunk, registers, row_of(layout.staged_dy_TH.in(base), token, hidden));
  }
  if (params.weights != nullptr) {
    const std::int64_t num_slots =
        static_cast<std::int64_t>(params.num_tokens) * view.routing().top_k;
    for (std::int64_t i = blockIdx.x * std::int64_t{kMoverThreads} + threadIdx.x; i < num_slots;
         i += std::int64_t{gridDim.x} * kMoverThreads) {
      layout.staged_weights_TK.in(base)[i] = params.weights[i];
    }
  }
  device::fence_async_global();  // peers may pull through their copy engines
}

void launch(const RankView& view, const StageParams& params, cudaStream_t stream) {
  check_num_tokens(view, params.num_tokens);
  if (params.num_tokens == 0) return;
  stage_kernel<<<num_multiprocessors() * kMoverBlocksAnSm, kMoverThreads, 0, stream>>>(
      view, params, RowCut(view.dims.hidden_dim));
  check_launch("stage_rows");
}

}  // namespace

void stage_forward(const RankView& view, const RowsInput& x_TH, std::int64_t num_tokens,
                   cudaStream_t stream) {
  launch(view, {x_TH, {}, nullptr, static_cast<std::int32_t>(num_tokens)}, stream);
}

void stage_backward(const RankView& view, std::byte* plan, const RowsInput& x_TH,
                    const RowsInput& dy_TH, std::int64_t num_tokens, cudaStream_t stream) {
  launch(view,
         {x_TH, dy_TH, view.plan_layout.weights_TK.in(plan), static_cast<std::int32_t>(num_tokens)},
         stream);
}

void load_stage_kernel() { load_kernel(reinterpret_cast<const void*>(&stage_kernel)); }

}  // namespace megamoe::gpu
