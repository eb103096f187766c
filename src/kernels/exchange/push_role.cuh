// What pushes of all rows and of some experts' share: what of one row goes where.
#pragma once

#include <cstdint>

#include "kernels/exchange/exchange.h"
#include "kernels/exchange/rows.cuh"

namespace megamoe::gpu {

__device__ inline std::int64_t slot_of(const RankView& view, const RowOrigin& origin) {
  return static_cast<std::int64_t>(origin.token) * view.routing().top_k + origin.slot;
}

/// Unit `unit` of rows cut into chunks, to the slot at its source that awaits the row.
__device__ inline void push_chunk(const RankView& view, const bf16* rows_CH,
                                  const RowOrigin* origin_C, const RowCut& cut, int unit) {
  const std::int64_t hidden = view.dims.hidden_dim;
  const int row = unit / cut.num_chunks;
  const int chunk = unit % cut.num_chunks;
  const RowOrigin origin = origin_C[row];
  if (origin.rank < 0) return;
  bf16* slots_TKH = view.symmetric.exchange.slot_rows_TKH.in(view.symmetric_R[origin.rank]);
  ChunkInRegisters registers;
  load_chunk(cut, chunk, row_of(rows_CH, row, hidden), registers);
  store_chunk(cut, chunk, registers, row_of(slots_TKH, slot_of(view, origin), hidden));
}

/// dw of a row: its segments in order.
__device__ inline void push_dweight(const RankView& view, const RowOrigin* origin_C,
                                    const DweightSegments& segments, int row) {
  const RowOrigin origin = origin_C[row];
  if (origin.rank < 0) return;
  float sum = segments.data[row];
  for (int segment = 1; segment < segments.num_segments; ++segment) {
    sum += segments.data[segment * segments.row_stride + row];
  }
  view.symmetric.exchange.slot_dweights_TK.in(
      view.symmetric_R[origin.rank])[slot_of(view, origin)] = sum;
}

}  // namespace megamoe::gpu
