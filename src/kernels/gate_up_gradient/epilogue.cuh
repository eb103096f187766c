// From p, g, u and w to dg, du, w a and dw's partial sums, 64 channels at a time.
//
// a = bf16(act(g) u); w a = bf16(w * a); da = w p; dg and du from the activation's gradient,
// rounded once; dw sums p * a in fp32. Rows beyond the expert's last are written as exact zeros:
// the weight gradients multiply them.
#pragma once

#include "device/barrier.cuh"
#include "device/cluster.cuh"
#include "device/matrix_store.cuh"
#include "kernels/gate_up_gradient/gate_up_gradient.h"
#include "kernels/products/epilogue.cuh"
#include "kernels/products/grouped_walk.cuh"

namespace megamoe::products {

/// Rows go in eights: with sixteen at a time the inputs, the results and 192 accumulators do not
/// fit the registers.
inline constexpr int kRowsPerStep = 8;
inline constexpr std::uint32_t kStepBytes = kRowsPerStep * kBlockK * 2;

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
/// first eight rows of a pass.
struct StepAddresses {
  std::uint32_t stage;     ///< g, to become dg; u lies kUpBytes further on
  std::uint32_t weighted;  ///< w a
  std::uint32_t weights;   ///< this lane's pair of row weights
  std::uint32_t sums;      ///< this lane's row of its warp's dw sums
};

/// What eight rows need from shared memory. The next step's travel while this one is computed: one
/// warp of each warpgroup on a scheduler does not hide their latency.
struct StepInputs {
  std::uint32_t g[2];
  std::uint32_t u[2];
  float2 weights;
  float sigmoid[4];  ///< of g

  __device__ void load(const StepAddresses& at, int step) {
    device::load_two_blocks_transposed(at.stage + step * kStepBytes, g);
    device::load_two_blocks_transposed(at.stage + kUpBytes + step * kStepBytes, u);
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                 : "=f"(weights.x), "=f"(weights.y)
                 : "r"(at.weights + step * (kRowsPerStep * 4))
                 : "memory");
  }
  /// Two special functions one after the other: started a step early, their latency is hidden.
  template <class Activation>
  __device__ void prepare(const Activation& activation) {
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      sigmoid[2 * pair] = activation.sigmoid(device::first_of(g[pair]));
      sigmoid[2 * pair + 1] = activation.sigmoid(device::second_of(g[pair]));
    }
  }
};

template <class Activation>
__device__ inline StepGradients step_gradients(const float* p, const StepInputs& in,
                                               const Activation& activation) {
  StepGradients out;
  const float2 w = in.weights;
#pragma unroll
  for (int pair = 0; pair < 2; ++pair) {
    const float g0 = device::first_of(in.g[pair]);
    const float g1 = device::second_of(in.g[pair]);
    const float u0 = device::first_of(in.u[pair]);
    const float u1 = device::second_of(in.u[pair]);
    const float s0 = in.sigmoid[2 * pair];
    const float s1 = in.sigmoid[2 * pair + 1];
    const std::uint32_t a =
        device::pack_bf16(activation.value(g0, u0, s0), activation.value(g1, u1, s1));
    const float a0 = device::first_of(a);
    const float a1 = device::second_of(a);
    const float p0 = p[2 * pair];
    const float p1 = p[2 * pair + 1];
    const auto gradient0 = activation.gradient(g0, u0, w.x * p0, s0);
    const auto gradient1 = activation.gradient(g1, u1, w.y * p1, s1);
    out.dg[pair] = device::pack_bf16(gradient0.dg, gradient1.dg);
    out.du[pair] = device::pack_bf16(gradient0.du, gradient1.du);
    out.wa[pair] = device::pack_bf16(w.x * a0, w.y * a1);
    out.dw.x = pair == 0 ? p0 * a0 : fmaf(p0, a0, out.dw.x);
    out.dw.y = pair == 0 ? p1 * a1 : fmaf(p1, a1, out.dw.y);
  }
  return out;
}

/// Zeroes this warp's 16 channels of the rows from `first_row` to `end_row` (at most 15) of dg, du
/// and w a. Done after the rows are written, so that the arithmetic carries no masks.
__device__ inline void zero_pad_rows(std::uint32_t part, std::uint32_t weighted, int first_row,
                                     int end_row) {
  __syncwarp();
  const int lane = device::lane_idx();
  const int row = first_row + lane / 2;
  if (row >= end_row) return;
  const std::uint32_t warp = threadIdx.x % device::kWarpgroupSize / device::kWarpSize;
  const std::uint32_t offset = device::swizzled_offset(row, 2 * warp + lane % 2);
  for (const std::uint32_t address : {part + offset, part + kUpBytes + offset, weighted + offset}) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(address), "r"(0) : "memory");
  }
}

__device__ inline void store_step(const StepAddresses& at, int step, const StepGradients& out) {
  device::store_two_blocks_transposed(at.stage + step * kStepBytes, out.dg);
  device::store_two_blocks_transposed(at.stage + kUpBytes + step * kStepBytes, out.du);
  device::store_two_blocks_transposed(at.weighted + step * kStepBytes, out.wa);
}

__device__ inline void store_step_sum(std::uint32_t address, float2 dw) {
  const float sum = sum_over_channels(dw);
  if ((device::lane_idx() & 12) == 0) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(sum) : "memory");
  }
}

/// The rows of one gradient stage; `p` are their accumulators. The loop asks once a unit whether to
/// go on, so that the compiler interleaves two steps. Loads beyond the last row read stale shared
/// memory and are not used.
template <class Activation>
__device__ inline void write_gradient_part(const float* p, int num_units, const StepAddresses& at,
                                           const Activation& activation) {
  constexpr std::uint32_t kSumBytes = kRowsPerStep * sizeof(float);
  constexpr int kStepsPerUnit = schedule::kRowsPerUnit / kRowsPerStep;
  StepInputs inputs[2];
  inputs[0].load(at, 0);
  inputs[0].prepare(activation);
#pragma unroll
  for (int step = 0; step < kHalfRows / kRowsPerStep; ++step) {
    if (step % kStepsPerUnit == 0 && step / kStepsPerUnit >= num_units) break;
    inputs[(step + 1) % 2].load(at, step + 1);
    const StepGradients out = step_gradients(&p[step * 4], inputs[step % 2], activation);
    inputs[(step + 1) % 2].prepare(activation);
    store_step(at, step, out);
    store_step_sum(at.sums + step * kSumBytes, out.dw);
  }
}

/// dw's sums over the 64 channels of one part: the four warps' sums, in order.
__device__ inline void write_dw_segment(const GateUpGradientParams& params, const GroupedTile& tile,
                                        const GradientPart& part,
                                        const float (&warp_sums)[kWarpsPerWarpgroup][kTileRows]) {
  if (part.channel >= params.num_channels) return;
  float* segment =
      params.dw_segments + part.channel / kBlockChannels * params.row_capacity + tile.first_row;
  const int end = min(tile.num_rows, part.first_row + part.num_units * schedule::kRowsPerUnit);
  const int row = part.first_row + static_cast<int>(threadIdx.x) % device::kWarpgroupSize;
  if (row >= end) return;
  segment[row] = ((warp_sums[0][row] + warp_sums[1][row]) + warp_sums[2][row]) + warp_sums[3][row];
}
static_assert(kHalfRows <= device::kWarpgroupSize);

}  // namespace megamoe::products
