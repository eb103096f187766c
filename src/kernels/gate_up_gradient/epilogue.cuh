// From p, g, u and w to dg, du, w a and dw's partial sums, one part at a time.
//
// a = bf16(act(g) u); w a = bf16(w * a); da = w p; dg and du from the activation's gradient,
// rounded once; dw sums p * a in fp32. Rows beyond the expert's last are written as exact zeros:
// the weight gradients multiply them.
#pragma once

#include "device/barrier.cuh"
#include "device/cluster.cuh"
#include "device/matrix_store.cuh"
#include "kernels/gate_up_gradient/gate_up_gradient.h"
#include "kernels/products/grouped_walk.cuh"

namespace megamoe::products::gradient {

/// Rows go in eights: with sixteen at a time the inputs, the results and 192 accumulators do not
/// fit the registers.
inline constexpr int kRowsPerStep = 8;
inline constexpr std::uint32_t kStepBytes = kRowsPerStep * kBlockChannels * 2;

/// Activations whose special functions can be started a step early.
template <class Activation>
concept HasSigmoid = requires(const Activation& activation) {
  activation.sigmoid(0.0F);
};

/// Sums of the thread's two rows over the eight lanes that hold the same rows, in a fixed tree;
/// every lane ends with the sum of one row: the second where bit 4 of the lane is set.
__device__ inline float sum_over_channels(float2 sums) {
  const bool second = (device::lane_idx() & 16) != 0;
  const float mine = second ? sums.y : sums.x;
  const float other = second ? sums.x : sums.y;
  float sum = mine + __shfl_xor_sync(0xffffffffU, other, 16);
  sum += __shfl_xor_sync(0xffffffffU, sum, 8);
  return sum + __shfl_xor_sync(0xffffffffU, sum, 4);
}

/// The results of eight rows, packed as stmatrix takes them: [0] channels 0..7 of the warp, [1]
/// channels 8..15.
struct StepGradients {
  std::uint32_t dg[2];
  std::uint32_t du[2];
  std::uint32_t wa[2];
  float2 dw;
};

/// Where one lane works in shared memory (32-bit addresses: registers are scarce here), for the
/// first eight rows of a part.
struct StepAddresses {
  std::uint32_t matrices;  ///< g, to become dg; u and w a lie further on
  std::uint32_t weights;   ///< this lane's pair of row weights
  std::uint32_t sums;      ///< this lane's row of its warp's dw sums
};

/// What eight rows need from shared memory. The next step's travel while this one is computed: one
/// warp on a scheduler does not hide their latency.
template <class Activation>
struct StepInputs {
  std::uint32_t g[2] = {0, 0};
  std::uint32_t u[2];
  float2 weights;
  float sigmoid[4];  ///< of g

  __device__ void load(const StepAddresses& at, int step) {
    const std::uint32_t first = at.matrices + step * kStepBytes;
    if constexpr (Activation::kGated) device::load_two_blocks_transposed(first, g);
    device::load_two_blocks_transposed(first + kUpOffset, u);
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                 : "=f"(weights.x), "=f"(weights.y)
                 : "r"(at.weights + step * (kRowsPerStep * 4))
                 : "memory");
  }
  /// Two special functions one after the other: started a step early, their latency is hidden.
  __device__ void prepare(const Activation& activation) {
    if constexpr (HasSigmoid<Activation>) {
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        sigmoid[2 * pair] = activation.sigmoid(device::first_of(g[pair]));
        sigmoid[2 * pair + 1] = activation.sigmoid(device::second_of(g[pair]));
      }
    }
  }
};

/// a, not yet rounded, and the gradient of one value.
struct ValueAndGradient {
  float a;
  GateUpGradient gradient;
};

template <class Activation>
__device__ inline ValueAndGradient apply(const Activation& activation, float g, float u, float da,
                                         float sigmoid) {
  if constexpr (HasSigmoid<Activation>) {
    return {activation.value(g, u, sigmoid), activation.gradient(g, u, da, sigmoid)};
  } else {
    return {activation.value(g, u), activation.gradient(g, u, da)};
  }
}

template <class Activation>
__device__ inline StepGradients step_gradients(const float* p, const StepInputs<Activation>& in,
                                               const Activation& activation) {
  StepGradients out;
  const float2 w = in.weights;
#pragma unroll
  for (int pair = 0; pair < 2; ++pair) {
    const float p0 = p[2 * pair];
    const float p1 = p[2 * pair + 1];
    const ValueAndGradient first =
        apply(activation, device::first_of(in.g[pair]), device::first_of(in.u[pair]), w.x * p0,
              in.sigmoid[2 * pair]);
    const ValueAndGradient second =
        apply(activation, device::second_of(in.g[pair]), device::second_of(in.u[pair]), w.y * p1,
              in.sigmoid[2 * pair + 1]);
    const std::uint32_t a = device::pack_bf16(first.a, second.a);
    const float a0 = device::first_of(a);
    const float a1 = device::second_of(a);
    out.dg[pair] = device::pack_bf16(first.gradient.dg, second.gradient.dg);
    out.du[pair] = device::pack_bf16(first.gradient.du, second.gradient.du);
    out.wa[pair] = device::pack_bf16(w.x * a0, w.y * a1);
    out.dw.x = pair == 0 ? p0 * a0 : fmaf(p0, a0, out.dw.x);
    out.dw.y = pair == 0 ? p1 * a1 : fmaf(p1, a1, out.dw.y);
  }
  return out;
}

/// Zeroes this warp's 16 channels of the part's rows from `first_row` on, in dg, du and w a. Done
/// after the rows are written, so that the arithmetic carries no masks.
__device__ inline void zero_pad_rows(std::uint32_t buffer, int first_row) {
  __syncwarp();
  const int lane = device::lane_idx();
  const int row = first_row + lane / 2;
  if (row >= kPartRows) return;
  const std::uint32_t warp = threadIdx.x % device::kWarpgroupSize / device::kWarpSize;
  const std::uint32_t address = buffer + device::swizzled_offset(row, 2 * warp + lane % 2);
  for (std::uint32_t matrix = 0; matrix < kPartBytes; matrix += kMatrixBytes) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(address + matrix), "r"(0)
                 : "memory");
  }
}

template <class Activation>
__device__ inline void store_step(const StepAddresses& at, int step, const StepGradients& out) {
  const std::uint32_t first = at.matrices + step * kStepBytes;
  if constexpr (Activation::kGated) device::store_two_blocks_transposed(first, out.dg);
  device::store_two_blocks_transposed(first + kUpOffset, out.du);
  device::store_two_blocks_transposed(first + kWeightedOffset, out.wa);
}

__device__ inline void store_step_sum(std::uint32_t address, float2 dw) {
  const float sum = sum_over_channels(dw);
  if ((device::lane_idx() & 12) == 0) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(sum) : "memory");
  }
}

/// The rows of one part; `p` are their accumulators.
template <class Activation>
__device__ inline void write_part(const float* p, const StepAddresses& at,
                                  const Activation& activation) {
  constexpr std::uint32_t kSumBytes = kRowsPerStep * sizeof(float);
  constexpr int kNumSteps = kPartRows / kRowsPerStep;
  StepInputs<Activation> inputs[kNumSteps];
  inputs[0].load(at, 0);
  inputs[0].prepare(activation);
#pragma unroll
  for (int step = 0; step < kNumSteps; ++step) {
    const bool has_next = step + 1 < kNumSteps;
    if (has_next) inputs[step + 1].load(at, step + 1);
    const StepGradients out = step_gradients(&p[step * 4], inputs[step], activation);
    if (has_next) inputs[step + 1].prepare(activation);
    store_step<Activation>(at, step, out);
    store_step_sum(at.sums + step * kSumBytes, out.dw);
  }
}

/// dw's sums over the 64 channels of one part: the four warps' sums, in order.
__device__ inline void write_dw_segment(const GateUpGradientParams& params, const GroupedTile& tile,
                                        const Part& part,
                                        const float (&warp_sums)[kWarpsPerWarpgroup][kPartRows]) {
  if (part.channel >= params.num_channels) return;
  const int num_rows = min(tile.num_rows - part.first_row, kPartRows);
  const int row = static_cast<int>(threadIdx.x) % device::kWarpgroupSize;
  if (row >= num_rows) return;
  float* segment = params.dw_segments + part.channel / kBlockChannels * params.row_capacity +
                   tile.first_row + part.first_row;
  segment[row] = ((warp_sums[0][row] + warp_sums[1][row]) + warp_sums[2][row]) + warp_sums[3][row];
}
static_assert(kPartRows <= static_cast<int>(device::kWarpgroupSize));

}  // namespace megamoe::products::gradient
