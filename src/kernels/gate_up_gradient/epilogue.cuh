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

  __device__ void advance(int num_steps) {
    stage += num_steps * kStepBytes;
    weighted += num_steps * kStepBytes;
    weights += num_steps * (kRowsPerStep * 4);
    sums += num_steps * (kRowsPerStep * 4);
  }
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

inline constexpr int kStepsPerPass = 8;
inline constexpr int kPasses = kTileRows / kRowsPerStep / kStepsPerPass;

/// All rows of one gradient stage. Loads beyond the tile's rows read stale shared memory and are
/// not used. Consumes `p`: after eight steps the next 32 accumulators move to the front, so that
/// the code of eight steps, 17 KB, serves all.
template <class Activation>
__device__ inline void write_gradient_stage(float (&p)[kAccumulators], int num_units, int rows_left,
                                            StepAddresses at, const Activation& activation) {
  int steps_left = num_units * (schedule::kRowsPerUnit / kRowsPerStep);
  StepInputs inputs[2];
  inputs[0].load(at, 0);
#pragma unroll 1
  while (true) {
#pragma unroll
    for (int step = 0; step < kStepsPerPass; ++step) {
      if (step >= steps_left) break;
      inputs[(step + 1) % 2].load(at, step + 1);
      const StepInputs& in = inputs[step % 2];
      StepGradients out = step_gradients(&p[step * 4], in.g, in.u, in.weights, activation);
      if (rows_left - step * kRowsPerStep < kRowsPerStep)
        mask_step(out, rows_left - step * kRowsPerStep);
      device::store_two_blocks_transposed(at.stage + step * kStepBytes, out.dg);
      device::store_two_blocks_transposed(at.stage + kUpBytes + step * kStepBytes, out.du);
      device::store_two_blocks_transposed(at.weighted + step * kStepBytes, out.wa);
      const float sum = sum_over_channels(out.dw);
      if ((device::lane_idx() & 12) == 0) {
        asm volatile("st.shared.f32 [%0], %1;" ::"r"(at.sums + step * (kRowsPerStep * 4)), "f"(sum)
                     : "memory");
      }
    }
    steps_left -= kStepsPerPass;
    if (steps_left <= 0) break;
    rows_left -= kStepsPerPass * kRowsPerStep;
    at.advance(kStepsPerPass);
#pragma unroll
    for (int i = 0; i < kAccumulators - kStepsPerPass * 4; ++i) p[i] = p[i + kStepsPerPass * 4];
  }
}

/// dw's sum over the stage's 64 channels: the four warps' sums, in order.
__device__ inline void write_dw_segment(const GateUpGradientParams& params, const GroupedTile& tile,
                                        int channel,
                                        const float (&warp_sums)[kWarpsPerWarpgroup][kTileRows]) {
  if (channel >= params.num_channels) return;
  float* segment =
      params.dw_segments + channel / kBlockChannels * params.row_capacity + tile.first_row;
  const int num_rows = min(tile.num_rows, tile.num_units * schedule::kRowsPerUnit);
  for (int row = static_cast<int>(threadIdx.x) % device::kWarpgroupSize; row < num_rows;
       row += device::kWarpgroupSize) {
    segment[row] =
        ((warp_sums[0][row] + warp_sums[1][row]) + warp_sums[2][row]) + warp_sums[3][row];
  }
}

}  // namespace megamoe::products
