// The products whose rows are tokens grouped by expert: what each one multiplies, and how its
// operands lie in a stage.
//
// Shapes: N rows, H hidden, I intermediate, e experts.
//   down     o[N, H]  = a[N, I] * down[e, H, I]^T                     channels H, K = I
//   gate_up  a[N, I]  = act(x gate^T) * (x up^T), x[N, H]             channels I (gate and up of
//   each), K = H
//   up       a[N, I]  = act(x up^T), activations without a gate       channels I, K = H
//   dx       dx[N, H] = dg[N, I] * gate[e, I, H] + du[N, I] * up      channels H, K = all of dg,
//   then all of du; without a gate all of du
#pragma once

#include <cuda.h>

#include <cstdint>

#include "device/call_control.h"
#include "kernels/products/pieces.h"
#include "kernels/products/tile_shape.h"
#include "trace/region.h"

namespace megamoe::products {

enum class RowProduct { down, gate_up, gate_up_saving, dx, up, up_saving };

inline constexpr int kMaxSources = 2;
inline constexpr int kMaxOutputs = 3;

/// One map for each possible number of units of a tile: a copy moves exactly the tile's rows.
/// maps[u - 1] has a box of u units where CTAs load or store whole tiles, of u half units where the
/// CTAs of a cluster load half a tile each.
struct RowMaps {
  CUtensorMap by_units[schedule::kMaxUnitsPerTile];
};

using schedule::GroupedRowsArgs;
using schedule::GroupedTile;

struct RowProductParams {
  CUtensorMap weights[kMaxSources];  ///< gate_up, dx: gate if there is one, up. others: one
  RowMaps row_inputs[kMaxSources];   ///< dx: dg if there is a gate, du. others: x or a
  RowMaps outputs[kMaxOutputs];      ///< gate_up_saving: g, u, a. up_saving: u, a. others: one
  GroupedRowsArgs rows;
  std::int32_t num_channel_tiles;      ///< CTA tiles along the output's channels
  std::int32_t num_k_blocks;           ///< over all sources
  std::int32_t num_k_blocks_a_source;  ///< dx: K blocks of dg, or of du
  device::ProductEnds* ends;           ///< or null
  trace::Region trace_region;
};

template <RowProduct kProduct>
inline constexpr bool kIsGateUp =
    kProduct == RowProduct::gate_up || kProduct == RowProduct::gate_up_saving;

template <RowProduct kProduct>
inline constexpr bool kIsUngatedUp =
    kProduct == RowProduct::up || kProduct == RowProduct::up_saving;

/// Output channels of one CTA tile: gate and up share the 256.
template <RowProduct kProduct>
inline constexpr int kOutputChannels = kIsGateUp<kProduct> ? kTileChannels / 2 : kTileChannels;

/// Pieces of 64 channels that one warpgroup passes to the store warps at a tile's end.
template <RowProduct kProduct>
inline constexpr int kNumPieces = kProduct == RowProduct::gate_up          ? 1
                                  : kProduct == RowProduct::gate_up_saving ? 3
                                  : kProduct == RowProduct::up_saving      ? 4
                                                                           : 2;

template <RowProduct kProduct>
using Pieces = PieceNumbering<kNumPieces<kProduct>>;

struct NoActivation {};

}  // namespace megamoe::products
