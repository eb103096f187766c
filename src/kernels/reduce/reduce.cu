// A thread owns eight columns of a token and walks its slots in order; the loads of eight slots are
// in flight at once.
#include "device/matrix_store.cuh"
#include "kernels/exchange/rows.cuh"
#include "kernels/launch.h"
#include "kernels/reduce/reduce.h"

namespace megamoe::gpu {
namespace {

constexpr int kReduceThreads = 128;
constexpr int kSlotsInFlight = 8;

struct ReduceParams {
  const std::int32_t* ids_TK;
  const float* weights_TK;
  RowsOutput out;
  DweightsOutput dweights;  ///< backward only
  std::int32_t blocks_a_token;
};

__device__ void add_pair(std::uint32_t pair, float weight, float& first, float& second) {
  first = __fmaf_rn(weight, device::first_of(pair), first);
  second = __fmaf_rn(weight, device::second_of(pair), second);
}

__device__ void add_vector(const Vector& values, float weight, float (&sums)[kVectorElements]) {
  add_pair(values.x, weight, sums[0], sums[1]);
  add_pair(values.y, weight, sums[2], sums[3]);
  add_pair(values.z, weight, sums[4], sums[5]);
  add_pair(values.w, weight, sums[6], sums[7]);
}

/// Adds up to kSlotsInFlight slots from `first` on.
template <CallKind kKind>
__device__ void add_slots(const RankView& view, const ReduceParams& params, std::int64_t token,
                          int first, int vector, float (&sums)[kVectorElements]) {
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
    if (filled[i]) add_vector(values[i], weights[i], sums);
  }
}

template <CallKind kKind>
__global__ __launch_bounds__(kReduceThreads) void reduce_kernel(
    const __grid_constant__ RankView view, const ReduceParams params) {
  if (view.control()->call_failed != 0) return;
  const int top_k = view.routing().top_k;
  const std::int64_t token = blockIdx.x / static_cast<unsigned>(params.blocks_a_token);
  const int part = static_cast<int>(blockIdx.x % static_cast<unsigned>(params.blocks_a_token));
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
  float sums[kVectorElements] = {};
  for (int first = 0; first < top_k; first += kSlotsInFlight) {
    add_slots<kKind>(view, params, token, first, vector, sums);
  }
  row_of(params.out.data, token, params.out.stride)[vector] =
      Vector{device::pack_bf16(sums[0], sums[1]), device::pack_bf16(sums[2], sums[3]),
             device::pack_bf16(sums[4], sums[5]), device::pack_bf16(sums[6], sums[7])};
}

ReduceParams params_of(const RankView& view, std::byte* plan, const RowsOutput& out) {
  const std::int64_t num_vectors = view.dims.hidden_dim / kVectorElements;
  return {view.plan_layout.ids_TK.in(plan),
          view.plan_layout.weights_TK.in(plan),
          out,
          {},
          static_cast<std::int32_t>((num_vectors + kReduceThreads - 1) / kReduceThreads)};
}

template <CallKind kKind>
void launch(const RankView& view, const ReduceParams& params, std::int64_t num_tokens,
            cudaStream_t stream) {
  check_num_tokens(view, num_tokens);
  if (num_tokens == 0) return;
  const auto num_blocks = static_cast<unsigned>(num_tokens * params.blocks_a_token);
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

void load_reduce_kernels() {
  load_kernel(reinterpret_cast<const void*>(&reduce_kernel<CallKind::forward>));
  load_kernel(reinterpret_cast<const void*>(&reduce_kernel<CallKind::backward>));
}

}  // namespace megamoe::gpu
