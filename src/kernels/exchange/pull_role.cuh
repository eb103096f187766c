// What both ways of pulling share: which pulls there are, what is noted about a row, and pad rows.
#pragma once

#include <cstdint>

#include "kernels/exchange/exchange.h"
#include "kernels/exchange/rows.cuh"

namespace megamoe::gpu {

/// One chunk of one token that this rank pulls; the same in all lanes but for `row` and `slot`.
struct PullUnit {
  std::int32_t source;
  std::int32_t token;
  std::int32_t num_rows;
  std::int32_t chunk;
  std::int32_t row;   ///< lane i < num_rows: the i-th row that the token fills
  std::int32_t slot;  ///< and its slot at the source
};

/// Pulls of one source: [begin, end) of its lists' tokens.
struct PullRange {
  std::int64_t begin;
  std::int64_t end;
};

/// Calls body(unit) for the warp's share of the pulls range_of(source, lists): own tokens first,
/// then the next rank's, so that not all ranks read from the same one.
template <class RangeOf, class Body>
__device__ void for_each_pull_of(const RankView& view, int num_chunks, RangeOf range_of,
                                 Body body) {
  const int num_ranks = view.routing().num_ranks;
  int next = global_warp();
  for (int step = 0; step < num_ranks; ++step) {
    const int source = (view.rank + step) % num_ranks;
    const PullLists lists = view.pull_lists(source);
    const PullRange range = range_of(source, lists);
    const int num_units = static_cast<int>(range.end - range.begin) * num_chunks;
    for (; next < num_units; next += num_global_warps()) {
      const PullToken pull = lists.tokens[range.begin + next / num_chunks];
      PullUnit unit{source, pull.token, pull.num_slots, next % num_chunks, 0, 0};
      if (device::lane_idx() < pull.num_slots) {
        const PullSlot slot = lists.slots[pull.first_slot + device::lane_idx()];
        unit.row = static_cast<std::int32_t>(slot.row);
        unit.slot = slot.slot;
      }
      body(unit);
    }
    next -= num_units;
  }
}

/// The same for all pulls of this rank.
template <class Body>
__device__ void for_each_pull(const RankView& view, int num_chunks, Body body) {
  const auto all = [&](int /*source*/, const PullLists& lists) {
    return PullRange{lists.destination_begin[view.rank], lists.destination_begin[view.rank + 1]};
  };
  for_each_pull_of(view, num_chunks, all, body);
}

/// One chunk of a token to every row that it fills.
__device__ inline void copy_chunk(const RowCut& cut, const PullUnit& unit, const Vector* from,
                                  bf16* rows_CH, std::int64_t hidden) {
  ChunkInRegisters registers;
  load_chunk(cut, unit.chunk, from, registers);
  for (int i = 0; i < unit.num_rows; ++i) {
    const int row = __shfl_sync(0xffffffffU, unit.row, i);
    store_chunk(cut, unit.chunk, registers, row_of(rows_CH, row, hidden));
  }
}

/// Origin and weight of the unit's rows, once a token.
__device__ inline void note_rows(const RankView& view, const PullUnit& unit,
                                 const PulledRows& rows) {
  if (unit.chunk != 0 || device::lane_idx() >= unit.num_rows) return;
  rows.origin_C[unit.row] = {unit.source, unit.token, unit.slot};
  if (rows.weight_C == nullptr) return;
  const float* weights_TK =
      view.symmetric.exchange.staged_weights_TK.in(view.symmetric_R[unit.source]);
  rows.weight_C[unit.row] =
      weights_TK[static_cast<std::int64_t>(unit.token) * view.routing().top_k + unit.slot];
}

__device__ inline void zero_row(const RowCut& cut, Vector* row) {
  for (int vector = device::lane_idx(); vector < cut.num_vectors; vector += device::kWarpSize) {
    row[vector] = Vector{0, 0, 0, 0};
  }
}

/// Rows behind those of each of this rank's experts [first, end), up to the next expert's: weight
/// gradients multiply them.
__device__ inline void clear_pads_of(const RankView& view, std::byte* plan, int first, int end,
                                     const RowCut& cut, const PulledRows& rows) {
  const std::int64_t* expert_begin = view.plan_layout.expert_begin.in(plan);
  const std::int32_t* count_e = view.plan_layout.group_count_e.in(plan);
  const int num_units = (end - first) * static_cast<int>(kGpuRowAlignment);
  for (int unit = global_warp(); unit < num_units; unit += num_global_warps()) {
    const int expert = first + unit / static_cast<int>(kGpuRowAlignment);
    const std::int64_t row = expert_begin[expert] + count_e[expert] + unit % kGpuRowAlignment;
    if (row >= expert_begin[expert + 1]) continue;
    zero_row(cut, row_of(rows.x_CH, row, view.dims.hidden_dim));
    if (rows.dy_CH != nullptr) zero_row(cut, row_of(rows.dy_CH, row, view.dims.hidden_dim));
    if (device::lane_idx() != 0) continue;
    rows.origin_C[row] = {-1, 0, 0};
    if (rows.weight_C != nullptr) rows.weight_C[row] = 0.0F;
  }
}

/// The same for all experts of this rank.
__device__ inline void clear_pads(const RankView& view, std::byte* plan, const RowCut& cut,
                                  const PulledRows& rows) {
  clear_pads_of(view, plan, 0, view.routing().experts_per_rank(), cut, rows);
}

}  // namespace megamoe::gpu
