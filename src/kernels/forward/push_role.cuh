// The push warps of a product that pushes its rows: a finished piece of 64 channels leaves the
// slot row by row for the places at the rows' sources, eight lanes a row, so that no buffer of
// result rows exists and the network works under the products.
//
// Slots are written by stmatrix and read by ordinary loads: mbarriers alone order the two, no proxy
// takes part. What is stored becomes visible to the sources by the rendezvous after the kernel.
#pragma once

#include <cstdint>

#include "device/barrier.cuh"
#include "device/matrix_store.cuh"
#include "device/trace.cuh"
#include "kernels/products/grouped_walk.cuh"
#include "kernels/products/pieces.h"
#include "kernels/products/tile_tickets.cuh"
#include "kernels/rank_view.h"

namespace megamoe::products {

/// Where the tile's rows go; null for rows that nobody awaits. Each warp reads what it wrote
/// itself.
struct PushShared {
  std::uint64_t destinations[kTileRows];
  std::uint32_t call_failed;  ///< before this kernel
  TicketRing tickets;
};

/// All producer warps but the loading one. Each takes every third unit of 16 rows of every piece:
/// with two warps, a piece each, a slot was held four times as long, and down lost 1.2 us a tile.
inline constexpr int kNumPushWarps = 3;
inline constexpr int kMaxUnitsPerPushWarp = schedule::kMaxUnitsPerTile / kNumPushWarps;
static_assert(schedule::kMaxUnitsPerTile % kNumPushWarps == 0);
inline constexpr std::uint32_t kPushTicketReaders = num_ticket_readers(1 + kNumPushWarps);

inline constexpr int kLanesARow = kBlockChannels * 2 / 16;
inline constexpr int kRowsAtOnce = device::kWarpSize / kLanesARow;

/// Where a row's result goes.
__device__ inline std::uint64_t destination_of(const gpu::RankView& view, const RowOrigin& origin) {
  const bf16* slots_TKH =
      view.symmetric.exchange.slot_rows_TKH.in(view.symmetric_R[max(origin.rank, 0)]);
  const std::int64_t slot =
      static_cast<std::int64_t>(origin.token) * view.routing().top_k + origin.slot;
  const auto address = reinterpret_cast<std::uint64_t>(slots_TKH + slot * view.dims.hidden_dim);
  return origin.rank < 0 ? 0 : address;
}

/// The row of the tile that lane `lane` of a push warp looks at in step `step`: two of the warp's
/// units a step.
__device__ inline int row_of_lane(int push_warp, int step) {
  const int half = device::lane_idx() / schedule::kRowsPerUnit;
  const int unit = push_warp + (2 * step + half) * kNumPushWarps;
  return unit * schedule::kRowsPerUnit + device::lane_idx() % schedule::kRowsPerUnit;
}

/// One warp notes the destinations of its units' rows, null from the group's last row on.
__device__ inline void note_destinations(const gpu::RankView& view, const RowOrigin* origin_C,
                                         const GroupedTile& tile, int push_warp,
                                         std::uint64_t* destinations) {
  constexpr int kSteps = kMaxUnitsPerPushWarp / 2;
  RowOrigin origins[kSteps];
  const int num_rows = min(tile.num_rows, tile.num_units * schedule::kRowsPerUnit);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int row = row_of_lane(push_warp, step);
    origins[step] = {-1, 0, 0};
    if (row < num_rows) origins[step] = origin_C[tile.first_row + row];
  }
  __syncwarp();  // all lanes have read the last tile's
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    destinations[row_of_lane(push_warp, step)] = destination_of(view, origins[step]);
  }
  __syncwarp();
}

__device__ inline void store_global_vector(std::uint64_t address, const uint4& v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}

/// Stores a warp's units of one piece; `column_bytes` is where its channels begin in a row.
__device__ inline void push_piece(std::uint32_t slot, const std::uint64_t* destinations,
                                  int num_units, int push_warp, std::uint32_t column_bytes) {
  const std::uint32_t lane_row = static_cast<std::uint32_t>(device::lane_idx() / kLanesARow);
  const std::uint32_t chunk = static_cast<std::uint32_t>(device::lane_idx() % kLanesARow);
  const std::uint64_t lane_column = column_bytes + chunk * 16U;
#pragma unroll 1
  for (int unit = push_warp; unit < num_units; unit += kNumPushWarps) {
    constexpr int kLoads = schedule::kRowsPerUnit / kRowsAtOnce;
    uint4 values[kLoads];
    std::uint64_t to[kLoads];
    // All loads before the first store.
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const std::uint32_t row =
          static_cast<std::uint32_t>(unit * schedule::kRowsPerUnit + i * kRowsAtOnce) + lane_row;
      to[i] = destinations[row];
      values[i] = device::load_shared_vector(slot + device::swizzled_offset(row, chunk));
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (to[i] != 0) store_global_vector(to[i] + lane_column, values[i]);
    }
  }
}

/// One of the push warps, all lanes.
template <RowProduct kProduct, Shared kShared, class Tickets>
__device__ inline void push_role(const gpu::RankView& view, const RowOrigin* origin_C,
                                 const RowProductParams& params, SharedStorage& shared,
                                 PushShared& push, int cta_rank, int push_warp, Tickets tickets) {
  using Pieces = Pieces<kProduct>;
  static_assert(!kIsGateUp<kProduct> && kNumPieces<kProduct> == kBlocksPerWarpgroup);
  const std::uint32_t row_bytes = static_cast<std::uint32_t>(view.dims.hidden_dim) * 2U;
  trace::Recorder recorder(params.trace_region, trace::track_warp_1 + push_warp,
                           device::lane_idx());
  std::uint32_t parities = 0;
  GroupedWalk<kShared, Tickets> walk(params.rows, params.num_channel_tiles, shared.first_tile,
                                     cta_rank, tickets);
  GroupedTile tile;
  while (walk.next(tile)) {
    if (tile.num_units == 0) continue;
    const trace::Span span(recorder, trace::Event::pushes, tile.group, tile.num_units);
    note_destinations(view, origin_C, tile, push_warp, push.destinations);
#pragma unroll 1
    for (int number = 0; number < Pieces::kPerTile; ++number) {
      const int slot = number % Pieces::kNumSlots;
      const int block =
          Pieces::warpgroup_of(number) * kBlocksPerWarpgroup + Pieces::piece_of(number);
      const std::uint32_t column_bytes =
          static_cast<std::uint32_t>(tile.channel_tile * kTileChannels + block * kBlockChannels) *
          2U;
      recorder.wait(device::shared_address(&shared.barriers.slot_filled[slot]),
                    parities >> slot & 1U);
      parities ^= 1U << slot;
      if (column_bytes < row_bytes) {  // else the channel tile reaches beyond the row
        push_piece(device::shared_address(shared.slots) + slot * Pieces::kSlotBytes,
                   push.destinations, tile.num_units, push_warp, column_bytes);
      }
      __syncwarp();
      if (device::lane_idx() == 0) {
        device::arrive(device::shared_address(
            &shared.barriers.slot_granted[Pieces::next_warpgroup_of(number)][slot]));
      }
    }
  }
  if (push_warp == 0 && device::lane_idx() == 0) device::note_end(params.ends);
}

}  // namespace megamoe::products
