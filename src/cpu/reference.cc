// Rounding points and orders of summation are a contract between backends (docs/numerics.md). Every
// stage is a loop over (expert, block of columns): a task owns its outputs, so no result depends on
// the number of threads.
#include "cpu/reference.h"

#include <algorithm>
#include <array>
#include <cstdint>

#include "base/activation.h"
#include "cpu/product.h"
#include "cpu/row_ops.h"

namespace megamoe::cpu {
namespace {

/// A task's rows [row_begin, row_end) of local expert `expert` and columns [col_begin, col_begin +
/// num_cols).
struct Tile {
  std::int64_t expert;
  std::int64_t row_begin;
  std::int64_t num_rows;
  std::int64_t col_begin;
  std::int64_t num_cols;
};

std::int64_t num_blocks(std::int64_t size) { return (size + kTileColumns - 1) / kTileColumns; }

/// Calls body(tile, scratch) for all rows of all experts and all of `num_columns`.
template <class Body>
void for_each_tile(const StageContext& stage, const CpuCallState& state, std::int64_t num_columns,
                   Body body) {
  const std::int64_t blocks = num_blocks(num_columns);
  const auto num_experts = static_cast<std::int64_t>(state.rows_e.size());
  stage.threads.parallel_for(num_experts * blocks, [&](std::int64_t task, int thread_idx) {
    const std::int64_t expert = task / blocks;
    const std::int64_t col = task % blocks * kTileColumns;
    const std::int64_t end = state.expert_begin[expert] + state.rows_e[expert];
    for (std::int64_t row = state.expert_begin[expert]; row < end; row += kTileRows) {
      body(Tile{expert, row, std::min(kTileRows, end - row), col,
                std::min(kTileColumns, num_columns - col)},
           stage.scratch[thread_idx]);
    }
  });
}

/// The matrix of one expert, element (r, c) as stored.
Operand expert_matrix(const ConstTensorView& weights, std::int64_t expert) {
  return {static_cast<const bf16*>(weights.data) + expert * weights.strides[0], weights.strides[1],
          1};
}

Operand transposed(Operand operand) {
  return {operand.data, operand.col_stride, operand.row_stride};
}

Operand rows_of(const bf16* rows, std::int64_t row_begin, std::int64_t width) {
  return Operand{rows, width, 1}.from(row_begin, 0);
}

/// tile = rows(x) * matrix^T for the tile's rows and columns, in fp32.
void multiply(const Tile& tile, Operand rows, Operand matrix, std::int64_t depth, ChainStart start,
              std::vector<float>& out, ThreadScratch& scratch) {
  product(tile.num_rows, tile.num_cols, depth, rows, matrix.from(tile.col_begin, 0), out.data(),
          kTileColumns, start, scratch.panels);
}

bf16* slot_row(const StageContext& stage, const RowOrigin& origin) {
  const std::int64_t slot =
      static_cast<std::int64_t>(origin.token) * stage.dims.routing.top_k + origin.slot;
  return stage.buffers.symmetric_R[origin.rank].slot_rows_TKH + slot * stage.dims.hidden_dim;
}

/// Rounds the tile in `scratch.tile` and stores each row where its result is awaited.
void send_rows(const StageContext& stage, const Tile& tile, const ThreadScratch& scratch) {
  for (std::int64_t i = 0; i < tile.num_rows; ++i) {
    bf16* out = slot_row(stage, stage.buffers.origin_C[tile.row_begin + i]) + tile.col_begin;
    const float* values = scratch.tile.data() + i * kTileColumns;
    round_row(values, tile.num_cols, out);
  }
}

/// Products of gate and up for the tile, in scratch.gate_tile and scratch.up_tile, not rounded yet.
template <class Policy>
void multiply_gate_up(const StageContext& stage, const Tile& tile, const ExpertWeights& experts,
                      ThreadScratch& scratch) {
  const std::int64_t hidden = stage.dims.hidden_dim;
  const Operand x = rows_of(stage.buffers.x_CH, tile.row_begin, hidden);
  if constexpr (Policy::kGated) {
    multiply(tile, x, expert_matrix(experts.gate, tile.expert), hidden, ChainStart::zero,
             scratch.gate_tile, scratch);
  }
  multiply(tile, x, expert_matrix(experts.up, tile.expert), hidden, ChainStart::zero,
           scratch.up_tile, scratch);
}

struct GateUp {
  bf16 g;
  bf16 u;
};

/// g and u of one element, rounded: the first rounding point.
template <class Policy>
GateUp rounded_gate_up(const ThreadScratch& scratch, std::int64_t i, std::int64_t j) {
  const std::int64_t index = i * kTileColumns + j;
  return {Policy::kGated ? to_bf16(scratch.gate_tile[index]) : bf16{},
          to_bf16(scratch.up_tile[index])};
}

template <class Policy>
bf16 rounded_a(const Policy& policy, GateUp gate_up) {
  return to_bf16(policy.value(to_float(gate_up.g), to_float(gate_up.u)));
}

/// The fixed tree of dw: halves are added until one value is left. Absent values count as zero.
float tree_sum(std::array<float, kDweightSegment>& values) {
  for (std::int64_t half = kDweightSegment / 2; half > 0; half /= 2) {
    for (std::int64_t i = 0; i < half; ++i) values[i] += values[i + half];
  }
  return values[0];
}

template <class Policy>
void gate_up_tile(const StageContext& stage, CpuCallState& state, const ExpertWeights& experts,
                  const Policy& policy, const Tile& tile, ThreadScratch& scratch) {
  const std::int64_t intermediate = stage.dims.intermediate_dim;
  multiply_gate_up<Policy>(stage, tile, experts, scratch);
  for (std::int64_t i = 0; i < tile.num_rows; ++i) {
    const std::int64_t row = tile.row_begin + i;
    const std::int64_t begin = row * intermediate + tile.col_begin;
    for (std::int64_t j = 0; j < tile.num_cols; ++j) {
      const GateUp gate_up = rounded_gate_up<Policy>(scratch, i, j);
      stage.buffers.a_CI[begin + j] = rounded_a(policy, gate_up);
      if (row < state.saved_row_capacity) {
        if constexpr (Policy::kGated) state.saved_g[begin + j] = gate_up.g;
        state.saved_u[begin + j] = gate_up.u;
      }
    }
  }
}

/// g and u of one element of the backward pass: saved, or just recomputed; equal bits.
template <class Policy>
GateUp backward_gate_up(const CpuCallState& state, std::int64_t row, std::int64_t index,
                        const ThreadScratch& scratch, std::int64_t i, std::int64_t j) {
  if (row >= state.saved_row_capacity) return rounded_gate_up<Policy>(scratch, i, j);
  return {Policy::kGated ? state.saved_g[index] : bf16{}, state.saved_u[index]};
}

/// From p (in scratch.tile), g and u: dg, du, w * a and the tile's segments of dw.
template <class Policy>
void p_epilogue(const StageContext& stage, const CpuCallState& state, const Policy& policy,
                const Tile& tile, const ThreadScratch& scratch) {
  const Buffers& buffers = stage.buffers;
  const std::int64_t intermediate = stage.dims.intermediate_dim;
  const std::int64_t num_segments = num_dweight_segments(intermediate);
  for (std::int64_t i = 0; i < tile.num_rows; ++i) {
    const std::int64_t row = tile.row_begin + i;
    const float weight = buffers.weight_C[row];
    for (std::int64_t segment = 0; segment < tile.num_cols; segment += kDweightSegment) {
      std::array<float, kDweightSegment> terms{};
      const std::int64_t end = std::min(tile.num_cols, segment + kDweightSegment);
      for (std::int64_t j = segment; j < end; ++j) {
        const std::int64_t index = row * intermediate + tile.col_begin + j;
        const GateUp gate_up = backward_gate_up<Policy>(state, row, index, scratch, i, j);
        const float p = scratch.tile[i * kTileColumns + j];
        const float a = to_float(rounded_a(policy, gate_up));
        const GateUpGradient gradient =
            policy.gradient(to_float(gate_up.g), to_float(gate_up.u), weight * p);
        if constexpr (Policy::kGated) buffers.dg_CI[index] = to_bf16(gradient.dg);
        buffers.du_CI[index] = to_bf16(gradient.du);
        buffers.a_CI[index] = to_bf16(weight * a);
        terms[j - segment] = p * a;
      }
      buffers.dweight_segments[row * num_segments + (tile.col_begin + segment) / kDweightSegment] =
          tree_sum(terms);
    }
  }
}

/// dw of every row: its segments in order.
void send_dweights(const StageContext& stage, const CpuCallState& state) {
  const std::int64_t num_segments = num_dweight_segments(stage.dims.intermediate_dim);
  for (std::int64_t row = 0; row < state.num_rows(); ++row) {
    const float* segments = stage.buffers.dweight_segments + row * num_segments;
    float sum = segments[0];
    for (std::int64_t segment = 1; segment < num_segments; ++segment) sum += segments[segment];
    const RowOrigin& origin = stage.buffers.origin_C[row];
    const std::int64_t slot =
        static_cast<std::int64_t>(origin.token) * stage.dims.routing.top_k + origin.slot;
    stage.buffers.symmetric_R[origin.rank].slot_dweights_TK[slot] = sum;
  }
}

/// d_matrix(i, j) = sum over the expert's rows of left(row, i) * right(row, j), for a block of i.
struct OuterProduct {
  const bf16* left;
  std::int64_t left_width;
  const bf16* right;
  std::int64_t right_width;
};

void store_gradient(const TensorView& out, WeightGradientMode mode, std::int64_t index,
                    const float* values, std::int64_t count) {
  if (mode == WeightGradientMode::store_bf16) {
    round_row(values, count, static_cast<bf16*>(out.data) + index);
    return;
  }
  float* target = static_cast<float*>(out.data) + index;
  if (mode == WeightGradientMode::store_fp32) {
    std::copy(values, values + count, target);
  } else {
    for (std::int64_t j = 0; j < count; ++j) target[j] += values[j];
  }
}

void weight_gradient(const StageContext& stage, const CpuCallState& state, WeightGradientMode mode,
                     const OuterProduct& factors, const TensorView& out) {
  const std::int64_t blocks = num_blocks(factors.left_width);
  const auto num_experts = static_cast<std::int64_t>(state.rows_e.size());
  stage.threads.parallel_for(num_experts * blocks, [&](std::int64_t task, int thread_idx) {
    const std::int64_t expert = task / blocks;
    const std::int64_t num_rows = state.rows_e[expert];
    // Adding zeros would turn a -0 of main_grad into +0: an expert without rows leaves it as it is.
    if (num_rows == 0 && mode == WeightGradientMode::accumulate_fp32) return;
    const std::int64_t begin = state.expert_begin[expert];
    const Operand left = transposed(rows_of(factors.left, begin, factors.left_width));
    const Operand right = transposed(rows_of(factors.right, begin, factors.right_width));
    const std::int64_t i_begin = task % blocks * kTileColumns;
    const std::int64_t num_i = std::min(kTileColumns, factors.left_width - i_begin);
    ThreadScratch& scratch = stage.scratch[thread_idx];
    for (std::int64_t j_begin = 0; j_begin < factors.right_width; j_begin += kTileRows) {
      const std::int64_t num_j = std::min(kTileRows, factors.right_width - j_begin);
      product(num_i, num_j, num_rows, left.from(i_begin, 0), right.from(j_begin, 0),
              scratch.tile.data(), kTileRows, ChainStart::zero, scratch.panels);
      for (std::int64_t i = 0; i < num_i; ++i) {
        const std::int64_t index =
            expert * out.strides[0] + (i_begin + i) * out.strides[1] + j_begin;
        store_gradient(out, mode, index, scratch.tile.data() + i * kTileRows, num_j);
      }
    }
  });
}

/// out_t = sum over the token's slots, in slot order, of weight * row: fp32 fma from 0, rounded
/// once.
template <class Weight>
void reduce_slots(const StageContext& stage, const CpuCallState& state, const TensorView& out,
                  Weight weight) {
  const std::int64_t hidden = stage.dims.hidden_dim;
  const std::int64_t top_k = stage.dims.routing.top_k;
  stage.threads.parallel_for(state.num_tokens, [&](std::int64_t token, int thread_idx) {
    const bf16* rows_KH = stage.buffers.mine().slot_rows_TKH + token * top_k * hidden;
    bf16* out_H = static_cast<bf16*>(out.data) + token * out.strides[0];
    float* sums = stage.scratch[thread_idx].tile.data();
    for (std::int64_t begin = 0; begin < hidden; begin += kTileColumns) {
      const std::int64_t count = std::min(kTileColumns, hidden - begin);
      std::fill(sums, sums + count, 0.0F);
      for (std::int64_t slot = 0; slot < top_k; ++slot) {
        if (state.ids_TK[token * top_k + slot] < 0) continue;  // its row holds anything
        const float w = weight(token * top_k + slot);
        const bf16* row = rows_KH + slot * hidden + begin;
        add_weighted_row(w, row, count, sums);
      }
      round_row(sums, count, out_H + begin);
    }
  });
}

}  // namespace

void gate_up_products(const StageContext& stage, CpuCallState& state,
                      const ExpertWeights& experts) {
  with_activation(stage.activation, [&](const auto& policy) {
    for_each_tile(stage, state, stage.dims.intermediate_dim,
                  [&](const Tile& tile, ThreadScratch& scratch) {
                    gate_up_tile(stage, state, experts, policy, tile, scratch);
                  });
  });
}

void down_products(const StageContext& stage, const CpuCallState& state,
                   const ExpertWeights& experts) {
  const std::int64_t intermediate = stage.dims.intermediate_dim;
  for_each_tile(stage, state, stage.dims.hidden_dim, [&](const Tile& tile, ThreadScratch& scratch) {
    multiply(tile, rows_of(stage.buffers.a_CI, tile.row_begin, intermediate),
             expert_matrix(experts.down, tile.expert), intermediate, ChainStart::zero, scratch.tile,
             scratch);
    send_rows(stage, tile, scratch);
  });
}

void reduce_outputs(const StageContext& stage, const CpuCallState& state, const TensorView& y) {
  reduce_slots(stage, state, y, [&](std::int64_t slot) { return state.weights_TK[slot]; });
}

void p_products(const StageContext& stage, const CpuCallState& state,
                const ExpertWeights& experts) {
  const std::int64_t hidden = stage.dims.hidden_dim;
  with_activation(stage.activation, [&](const auto& policy) {
    using Policy = std::decay_t<decltype(policy)>;
    for_each_tile(stage, state, stage.dims.intermediate_dim,
                  [&](const Tile& tile, ThreadScratch& scratch) {
                    multiply(tile, rows_of(stage.buffers.dy_CH, tile.row_begin, hidden),
                             transposed(expert_matrix(experts.down, tile.expert)), hidden,
                             ChainStart::zero, scratch.tile, scratch);
                    if (tile.row_begin + tile.num_rows > state.saved_row_capacity) {
                      multiply_gate_up<Policy>(stage, tile, experts, scratch);
                    }
                    p_epilogue(stage, state, policy, tile, scratch);
                  });
  });
  send_dweights(stage, state);
}

void dx_products(const StageContext& stage, const CpuCallState& state,
                 const ExpertWeights& experts) {
  const std::int64_t intermediate = stage.dims.intermediate_dim;
  for_each_tile(stage, state, stage.dims.hidden_dim, [&](const Tile& tile, ThreadScratch& scratch) {
    ChainStart start = ChainStart::zero;
    if (is_gated(stage.activation.kind)) {
      multiply(tile, rows_of(stage.buffers.dg_CI, tile.row_begin, intermediate),
               transposed(expert_matrix(experts.gate, tile.expert)), intermediate, start,
               scratch.tile, scratch);
      start = ChainStart::output;
    }
    multiply(tile, rows_of(stage.buffers.du_CI, tile.row_begin, intermediate),
             transposed(expert_matrix(experts.up, tile.expert)), intermediate, start, scratch.tile,
             scratch);
    send_rows(stage, tile, scratch);
  });
}

void weight_gradients(const StageContext& stage, const CpuCallState& state, WeightGradientMode mode,
                      const ExpertGradients& gradients) {
  const Buffers& buffers = stage.buffers;
  const std::int64_t hidden = stage.dims.hidden_dim;
  const std::int64_t intermediate = stage.dims.intermediate_dim;
  if (is_gated(stage.activation.kind)) {
    weight_gradient(stage, state, mode, {buffers.dg_CI, intermediate, buffers.x_CH, hidden},
                    gradients.gate);
  }
  weight_gradient(stage, state, mode, {buffers.du_CI, intermediate, buffers.x_CH, hidden},
                  gradients.up);
  weight_gradient(stage, state, mode, {buffers.dy_CH, hidden, buffers.a_CI, intermediate},
                  gradients.down);
}

void reduce_gradients(const StageContext& stage, const CpuCallState& state, const TensorView& dx,
                      const TensorView& dweights) {
  reduce_slots(stage, state, dx, [](std::int64_t /*slot*/) { return 1.0F; });
  const std::int64_t top_k = stage.dims.routing.top_k;
  for (std::int64_t token = 0; token < state.num_tokens; ++token) {
    float* out_K = static_cast<float*>(dweights.data) + token * dweights.strides[0];
    for (std::int64_t slot = 0; slot < top_k; ++slot) {
      const std::int64_t index = token * top_k + slot;
      out_K[slot] = state.ids_TK[index] < 0 ? 0.0F : stage.buffers.mine().slot_dweights_TK[index];
    }
  }
}

}  // namespace megamoe::cpu
