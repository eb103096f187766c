// The store warps of a product that pushes its rows: a finished piece of 64 channels leaves the
// slot row by row for the places at the rows' sources, eight lanes a row, so that no buffer of
// result rows exists and the network works under the products.
//
// Slots are written by stmatrix and read by ordinary loads: mbarriers alone order the two, no proxy
// takes part. What is stored becomes visible to the sources by the rendezvous after the kernel.
#pragma once

#include <cstdint>

#include "device/barrier.cuh"
#include "device/matrix_store.cuh"
#include "kernels/products/grouped_walk.cuh"
#include "kernels/products/pieces.h"
#include "kernels/rank_view.h"

namespace megamoe::products {

/// For each store warp where its tile's rows go; null for rows that nobody awaits.
struct PushShared {
  std::uint64_t destinations[kNumStoreWarps][kTileRows];
};

inline constexpr int kLanesARow = kBlockChannels * 2 / 16;
inline constexpr int kRowsAtOnce = device::kWarpSize / kLanesARow;

/// Where a row's result goes.
__device__ inline std::uint64_t destination_of(const gpu::RankView& view, const RowOrigin& origin) {
  if (origin.rank < 0) return 0;
  const bf16* slots_TKH = view.symmetric.exchange.slot_rows_TKH.in(view.symmetric_R[origin.rank]);
  const std::int64_t slot =
      static_cast<std::int64_t>(origin.token) * view.routing().top_k + origin.slot;
  return reinterpret_cast<std::uint64_t>(slots_TKH + slot * view.dims.hidden_dim);
}

/// One warp notes the destinations of the tile's rows, null from the group's last row to the next
/// multiple of 16.
__device__ inline void note_destinations(const gpu::RankView& view, const RowOrigin* origin_C,
                                         const GroupedTile& tile, std::uint64_t* destinations) {
  const int end = tile.num_units * schedule::kRowsPerUnit;
  __syncwarp();  // all lanes have read the last tile's
  for (int row = device::lane_idx(); row < end; row += device::kWarpSize) {
    destinations[row] =
        row < tile.num_rows ? destination_of(view, origin_C[tile.first_row + row]) : 0;
  }
  __syncwarp();
}

/// Stores one piece; `column_bytes` is where its channels begin in a row.
__device__ inline void push_piece(std::uint32_t slot, const std::uint64_t* destinations,
                                  int num_rows, std::uint32_t column_bytes) {
  const std::uint32_t lane_row = static_cast<std::uint32_t>(device::lane_idx() / kLanesARow);
  const std::uint32_t chunk = static_cast<std::uint32_t>(device::lane_idx() % kLanesARow);
  const std::uint64_t lane_column = column_bytes + chunk * 16U;
#pragma unroll 1
  for (int first = 0; first < num_rows; first += schedule::kRowsPerUnit) {
    constexpr int kLoads = schedule::kRowsPerUnit / kRowsAtOnce;
    uint4 values[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const std::uint32_t row = static_cast<std::uint32_t>(first + i * kRowsAtOnce) + lane_row;
      values[i] = device::load_shared_vector(slot + device::swizzled_offset(row, chunk));
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const std::uint64_t destination =
          destinations[first + i * kRowsAtOnce + static_cast<int>(lane_row)];
      if (destination != 0) *reinterpret_cast<uint4*>(destination + lane_column) = values[i];
    }
  }
}

/// One of the two store warps, all lanes.
template <RowProduct kProduct, Shared kShared>
__device__ inline void push_role(const gpu::RankView& view, const RowOrigin* origin_C,
                                 const RowProductParams& params, SharedStorage& shared,
                                 PushShared& push, int cta_rank, int store_warp) {
  using Pieces = Pieces<kProduct>;
  static_assert(!kIsGateUp<kProduct> && kNumPieces<kProduct> == kBlocksPerWarpgroup);
  const std::uint32_t row_bytes = static_cast<std::uint32_t>(view.dims.hidden_dim) * 2U;
  std::uint64_t* destinations = push.destinations[store_warp];
  std::uint32_t parities = 0;
  GroupedWalk<kShared> walk(params.rows, params.num_channel_tiles, shared.first_tile, cta_rank);
  GroupedTile tile;
  while (walk.next(tile)) {
    if (tile.num_units == 0) continue;
    note_destinations(view, origin_C, tile, destinations);
#pragma unroll 1
    for (int number = store_warp; number < Pieces::kPerTile; number += kNumStoreWarps) {
      const int slot = number % Pieces::kNumSlots;
      const int block =
          Pieces::warpgroup_of(number) * kBlocksPerWarpgroup + Pieces::piece_of(number);
      const std::uint32_t column_bytes =
          static_cast<std::uint32_t>(tile.channel_tile * kTileChannels + block * kBlockChannels) *
          2U;
      device::wait(device::shared_address(&shared.barriers.slot_filled[slot]),
                   parities >> slot & 1U);
      parities ^= 1U << slot;
      if (column_bytes < row_bytes) {  // else the channel tile reaches beyond the row
        push_piece(device::shared_address(shared.slots) + slot * Pieces::kSlotBytes, destinations,
                   tile.num_units * schedule::kRowsPerUnit, column_bytes);
      }
      __syncwarp();
      if (device::lane_idx() == 0) {
        device::arrive(device::shared_address(
            &shared.barriers.slot_granted[Pieces::next_warpgroup_of(number)][slot]));
      }
    }
  }
}

}  // namespace megamoe::products
