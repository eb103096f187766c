// The order in which clusters take the tiles of a product over rows grouped by expert: shared by
// the kernels and the CPU tests. All roles of a CTA walk the same object.
//
// Clusters take tiles from the list (expert, row tile, channel tile), channel tile fastest, in its
// order: those that run at the same time then work on the same one or two experts, whose weights
// and rows fit the L2. Which are a cluster's, its tickets say: every n-th of n clusters, or as it
// comes to them (kernels/products/tile_tickets.cuh).
#pragma once

#include <cstdint>

#include "schedule/row_blocks.h"

namespace megamoe::schedule {

inline constexpr int kClusterSize = 2;

/// Which operand the two CTAs of a cluster have in common.
enum class Shared { rows, channels };

/// Rows grouped by expert, as the device sees them.
struct GroupedRowsArgs {
  const std::int32_t* begin;  ///< [num_groups], multiples of 64
  const std::int32_t* count;  ///< [num_groups]
  std::int32_t num_groups;
};

/// One CTA's part of a cluster's tile.
struct GroupedTile {
  int group;
  int channel_tile;  ///< in CTA tiles
  int first_row;     ///< in the row buffers
  int num_rows;      ///< rows of the group from first_row on (may exceed the tile)
  int num_units;     ///< 0: this CTA has no rows, but still shares its channels
};

template <Shared kShared>
MEGAMOE_HOST_DEVICE constexpr int num_group_row_tiles(int num_rows) {
  return num_unit_tiles(num_row_units(num_rows), kMaxUnitsPerTile,
                        kShared == Shared::channels ? kClusterSize : 1);
}

/// Channel tiles as the walk counts them: pairs where the cluster shares rows.
template <Shared kShared>
MEGAMOE_HOST_DEVICE constexpr int num_walk_channel_tiles(int num_channel_tiles) {
  return kShared == Shared::rows ? ceil_div(num_channel_tiles, kClusterSize) : num_channel_tiles;
}

/// Tiles that clusters take of a group.
template <Shared kShared>
MEGAMOE_HOST_DEVICE constexpr int num_cluster_tiles(int num_rows, int num_channel_tiles) {
  const int row_tiles = num_group_row_tiles<kShared>(num_rows);
  return (kShared == Shared::channels ? row_tiles / kClusterSize : row_tiles) *
         num_walk_channel_tiles<kShared>(num_channel_tiles);
}

/// Tickets without a counter. `Grid` says which cluster walks and how many there are: cluster(),
/// num_clusters().
template <class Grid>
class EveryNth {
 public:
  MEGAMOE_HOST_DEVICE explicit EveryNth(Grid grid = {}) : grid_(grid), next_(grid.cluster()) {}

  [[nodiscard]] MEGAMOE_HOST_DEVICE int read() const { return next_; }
  MEGAMOE_HOST_DEVICE void hand_back() { next_ += grid_.num_clusters(); }

 private:
  [[no_unique_address]] Grid grid_;
  int next_;
};

/// `Tickets` says which tiles are the cluster's: read() gives a number, which only grows, and
/// hand_back() ends the read, but for the first beyond the last tile.
/// first_tile[0 .. num_groups] is the running number of cluster tiles.
template <Shared kShared, class Tickets>
class GroupedWalk {
 public:
  MEGAMOE_HOST_DEVICE GroupedWalk(const GroupedRowsArgs& rows, int num_channel_tiles,
                                  const std::int32_t* first_tile, int cta_rank,
                                  Tickets tickets = Tickets())
      : tickets_(tickets),
        rows_(rows),
        first_tile_(first_tile),
        walk_channel_tiles_(num_walk_channel_tiles<kShared>(num_channel_tiles)),
        cta_rank_(cta_rank),
        num_tiles_(first_tile[rows.num_groups]) {}

  /// Steps to the next tile; false when there is none.
  MEGAMOE_HOST_DEVICE bool next(GroupedTile& tile) {
    const int number = static_cast<int>(tickets_.read());
    if (number >= num_tiles_) return false;
    while (number >= first_tile_[group_ + 1]) ++group_;
    const int local = number - first_tile_[group_];
    tickets_.hand_back();

    const int count = rows_.count[group_];
    const int row_tiles = num_group_row_tiles<kShared>(count);
    const int channel = local % walk_channel_tiles_;
    const int row = local / walk_channel_tiles_;
    const UnitRange units = unit_tile(num_row_units(count), row_tiles,
                                      kShared == Shared::rows ? row : row * 2 + cta_rank_);
    tile.group = group_;
    tile.channel_tile = kShared == Shared::rows ? channel * 2 + cta_rank_ : channel;
    tile.first_row = rows_.begin[group_] + units.first * kRowsPerUnit;
    tile.num_rows = count - units.first * kRowsPerUnit;
    tile.num_units = units.count;
    return true;
  }

 private:
  Tickets tickets_;
  const GroupedRowsArgs& rows_;
  const std::int32_t* first_tile_;
  int walk_channel_tiles_;
  int cta_rank_;
  int num_tiles_;
  int group_ = 0;
};

/// The rows that one CTA's copies of a tile read: half of them where the cluster shares rows.
struct RowRange {
  int first = 0;
  int count = 0;
};
template <Shared kShared>
MEGAMOE_HOST_DEVICE constexpr RowRange rows_of_cta(const GroupedTile& tile, int cta_rank) {
  if constexpr (kShared == Shared::rows) {
    const int half_rows = tile.num_units * (kRowsPerUnit / 2);
    return {tile.first_row + cta_rank * half_rows, half_rows};
  } else {
    return {tile.first_row, tile.num_units * kRowsPerUnit};
  }
}

/// The blocks of rows that these copies wait for.
template <Shared kShared>
MEGAMOE_HOST_DEVICE constexpr BlockRange blocks_of_cta(const GroupedTile& tile, int cta_rank) {
  const RowRange rows = rows_of_cta<kShared>(tile, cta_rank);
  return blocks_of_rows(rows.first, rows.count);
}

}  // namespace megamoe::schedule
