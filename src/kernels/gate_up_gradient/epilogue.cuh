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

template <class Activation>
__device__ inline StepGradients step_gradients(const float* p, const std::uint32_t (&g)[2],
                                               const std::uint32_t (&u)[2], float2 w,
                                               const Activation& activation) {
  StepGradients out;
#pragma unroll
  for (int pair = 0; pair < 2; ++pair) {
    const float g0 = device::first_of(g[pair]);
    const float g1 = device::second_of(g[pair]);
    const float u0 = device::first_of(u[pair]);
    const float u1 = device::second_of(u[pair]);
    const std::uint32_t a = device::pack_bf16(activation.value(g0, u0), activation.value(g1, u1));
    const float a0 = device::first_of(a);
    const float a1 = device::second_of(a);
    const float p0 = p[2 * pair];
    const float p1 = p[2 * pair + 1];
    const auto gradient0 = activation.gradient(g0, u0, w.x * p0);
    const auto gradient1 = activation.gradient(g1, u1, w.y * p1);
    out.dg[pair] = device::pack_bf16(gradient0.dg, gradient1.dg);
    out.du[pair] = device::pack_bf16(gradient0.du, gradient1.du);
    out.wa[pair] = device::pack_bf16(w.x * a0, w.y * a1);
    out.dw.x = pair == 0 ? p0 * a0 : fmaf(p0, a0, out.dw.x);
    out.dw.y = pair == 0 ? p1 * a1 : fmaf(p1, a1, out.dw.y);
  }
  return out;
}

/// Zeroes the rows at and beyond `num_rows` of the eight.
__device__ inline void mask_step(StepGradients& out, int num_rows) {
  const int row = device::lane_idx() % 4 * 2;
  const std::uint32_t mask =
      (row < num_rows ? 0xffffU : 0U) | (row + 1 < num_rows ? 0xffff0000U : 0U);
#pragma unroll
  for (int pair = 0; pair < 2; ++pair) {
    out.dg[pair] &= mask;
    out.du[pair] &= mask;
    out.wa[pair] &= mask;
  }
}

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

  __device__ void load(const StepAddresses& at, int step) {
    device::load_two_blocks_transposed(at.stage + step * kStepBytes, g);
    device::load_two_blocks_transposed(at.stage + kUpBytes + step * kStepBytes, u);
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                 : "=f"(weights.x), "=f"(weights.y)
                 : "r"(at.weights + step * (kRowsPerStep * 4))
                 : "memory");
  }
};

/// The rows of one gradient stage. `p` holds their accumulators in front. Loads beyond the last row
/// read stale shared memory and are not used.
template <class Activation>
__device__ inline void write_gradient_part(const float* p, int num_units, int num_rows,
                                           const StepAddresses& at, const Activation& activation) {
  const int num_steps = num_units * (schedule::kRowsPerUnit / kRowsPerStep);
  StepInputs inputs[2];
  inputs[0].load(at, 0);
#pragma unroll
  for (int step = 0; step < kHalfRows / kRowsPerStep; ++step) {
    if (step >= num_steps) break;
    inputs[(step + 1) % 2].load(at, step + 1);
    const StepInputs& in = inputs[step % 2];
    StepGradients out = step_gradients(&p[step * 4], in.g, in.u, in.weights, activation);
    const int rows_left = num_rows - step * kRowsPerStep;
    if (rows_left < kRowsPerStep) mask_step(out, rows_left);
    device::store_two_blocks_transposed(at.stage + step * kStepBytes, out.dg);
    device::store_two_blocks_transposed(at.stage + kUpBytes + step * kStepBytes, out.du);
    device::store_two_blocks_transposed(at.weighted + step * kStepBytes, out.wa);
    const float sum = sum_over_channels(out.dw);
    if ((device::lane_idx() & 12) == 0) {
      asm volatile("st.shared.f32 [%0], %1;" ::"r"(at.sums + step * (kRowsPerStep * 4)), "f"(sum)
                   : "memory");
    }
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
