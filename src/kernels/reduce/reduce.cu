// A thread owns eight columns of a token and walks its slots in order; the loads of eight slots are
// in flight at once.
#include <algorithm>

#include "kernels/exchange/rows.cuh"
#include "kernels/launch.h"
#include "kernels/reduce/reduce.h"
#include "kernels/reduce/slot_sum.cuh"

namespace megamoe::gpu {
namespace {

constexpr int kReduceThreads = 128;
constexpr int kSlotsInFlight = 8;
constexpr unsigned kBlocksAnSm = 16;

struct ReduceParams {
  const std::int32_t* ids_TK;
  const float* weights_TK;
  RowsOutput out;
  DweightsOutput dweights;  ///< backward only
  std::int32_t blocks_a_token;
  std::int32_t num_tokens;
  const std::uint32_t* num_done;  ///< tokens that need nothing any more; null: none
};

/// Adds up to kSlotsInFlight slots from `first` on.
template <CallKind kKind>
__device__ void add_slots(const RankView& view, const ReduceParams& params, std::int64_t token,
                          int first, int vector, SlotSum& sum) {
  const int top_k = view.routing().top_k;
  const std::int64_t slot_base = token * top_k + first;
  const bf16* slots_TKH = view.symmetric.exchange.slot_rows_TKH.in(view.symmetric_R[view.rank]);
  Vector values[kSlotsInFlight];
  float weights[kSlotsInFlight];
  bool filled[kSlotsInFlight];
#pragma unroll
  for (int i = 0; i < kSlotsInFlight; ++i) {
    filled[i] = first + i < top_k && params.ids_TK[slot_base + i] >= 0;
    if (!filled[i]) continue;  // its row holds anything
    values[i] = load_once(row_of(slots_TKH, slot_base + i, view.dims.hidden_dim) + vector);
    weights[i] = kKind == CallKind::forward ? params.weights_TK[slot_base + i] : 1.0F;
  }
#pragma unroll
  for (int i = 0; i < kSlotsInFlight; ++i) {
    if (filled[i]) sum.add(values[i], weights[i]);
  }
}

/// One part of a token: kVectorElements columns a thread.
template <CallKind kKind>
__device__ void reduce_part(const RankView& view, const ReduceParams& params, std::int64_t token,
                            int part) {
  const int top_k = view.routing().top_k;
  const int vector = part * kReduceThreads + static_cast<int>(threadIdx.x);
  if constexpr (kKind == CallKind::backward) {
    const int slot = static_cast<int>(threadIdx.x);
    if (part == 0 && slot < top_k) {
      const float* sent_TK =
          view.symmetric.exchange.slot_dweights_TK.in(view.symmetric_R[view.rank]);
      params.dweights.data[token * params.dweights.stride + slot] =
          params.ids_TK[token * top_k + slot] < 0 ? 0.0F : sent_TK[token * top_k + slot];
    }
  }
  if (vector * kVectorElements >= view.dims.hidden_dim) return;
  SlotSum sum;
  for (int first = 0; first < top_k; first += kSlotsInFlight) {
    add_slots<kKind>(view, params, token, first, vector, sum);
  }
  row_of(params.out.data, token, params.out.stride)[vector] = sum.rounded();
}

template <CallKind kKind>
__global__ __launch_bounds__(kReduceThreads) void reduce_kernel(
    const __grid_constant__ RankView view, const ReduceParams params) {
  if (view.control()->call_failed != 0) return;
  const std::uint32_t num_done = params.num_done == nullptr ? 0 : *params.num_done;
  const auto blocks_a_token = static_cast<unsigned>(params.blocks_a_token);
  const unsigned end = static_cast<unsigned>(params.num_tokens) * blocks_a_token;
  for (unsigned block = num_done * blocks_a_token + blockIdx.x; block < end; block += gridDim.x) {
    reduce_part<kKind>(view, params, block / blocks_a_token,
                       static_cast<int>(block % blocks_a_token));
  }
}

ReduceParams params_of(const RankView& view, std::byte* plan, const RowsOutput& out) {
  const std::int64_t num_vectors = view.dims.hidden_dim / kVectorElements;
  return {view.plan_layout.ids_TK.in(plan),
          view.plan_layout.weights_TK.in(plan),
          out,
          {},
          static_cast<std::int32_t>((num_vectors + kReduceThreads - 1) / kReduceThreads),
          0,
          nullptr};
}

template <CallKind kKind>
void launch(const RankView& view, ReduceParams params, std::int64_t num_tokens,
            cudaStream_t stream) {
  check_num_tokens(view, num_tokens);
  if (num_tokens == 0) return;
  params.num_tokens = static_cast<std::int32_t>(num_tokens);
  auto num_blocks = static_cast<unsigned>(num_tokens * params.blocks_a_token);
  // Blocks that find nothing to do take as long as those that do.
  if (params.num_done != nullptr) {
    num_blocks = std::min(num_blocks, static_cast<unsigned>(num_multiprocessors()) * kBlocksAnSm);
  }
  reduce_kernel<kKind><<<num_blocks, kReduceThreads, 0, stream>>>(view, params);
  check_launch("reduce");
}

}  // namespace

void reduce_outputs(const RankView& view, std::byte* plan, const RowsOutput& y_TH,
                    std::int64_t num_tokens, cudaStream_t stream) {
  launch<CallKind::forward>(view, params_of(view, plan, y_TH), num_tokens, stream);
}

void reduce_gradients(const RankView& view, std::byte* plan, const RowsOutput& dx_TH,
                      const DweightsOutput& dweights_TK, std::int64_t num_tokens,
                      cudaStream_t stream) {
  ReduceParams params = params_of(view, plan, dx_TH);
  params.dweights = dweights_TK;
  launch<CallKind::backward>(view, params, num_tokens, stream);
}

void reduce_other_gradients(const RankView& view, std::byte* plan, const RowsOutput& dx_TH,
                            const DweightsOutput& dweights_TK, std::int64_t num_tokens,
                            cudaStream_t stream) {
  ReduceParams params = params_of(view, plan, dx_TH);
  params.dweights = dweights_TK;
  params.num_done = view.scratch_layout.num_reduced.in(view.scratch);
  launch<CallKind::backward>(view, params, num_tokens, stream);
}

void load_reduce_kernels() {
  load_kernel(reinterpret_cast<const void*>(&reduce_kernel<CallKind::forward>));
  load_kernel(reinterpret_cast<const void*>(&reduce_kernel<CallKind::backward>));
}

}  // namespace megamoe::gpu
