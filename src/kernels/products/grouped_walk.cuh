// The order in which clusters take the tiles of a product over rows grouped by expert. All roles of
// a CTA walk the same object.
//
// Cluster c takes tiles c, c + C, c + 2C, ... of the list (expert, row tile, channel tile), channel
// tile fastest: the clusters that run at the same time then work on the same one or two experts,
// whose weights and rows fit the L2.
#pragma once

#include <cstdint>

#include "device/cluster.cuh"
#include "kernels/products/row_product.h"

namespace megamoe::products {

template <Shared kShared>
__device__ inline int num_group_row_tiles(int num_rows) {
  return schedule::num_unit_tiles(schedule::num_row_units(num_rows), schedule::kMaxUnitsPerTile,
                                  kShared == Shared::channels ? kClusterSize : 1);
}

/// Channel tiles as the walk counts them: pairs where the cluster shares rows.
template <Shared kShared>
__device__ inline int num_walk_channel_tiles(int num_channel_tiles) {
  return kShared == Shared::rows ? schedule::ceil_div(num_channel_tiles, kClusterSize)
                                 : num_channel_tiles;
}

/// One warp fills first_tile[0 .. num_groups] with the running number of cluster tiles.
template <Shared kShared>
__device__ inline void count_tiles(const GroupedRowsArgs& rows, int num_channel_tiles,
                                   std::int32_t* first_tile) {
  const int lane = device::lane_idx();
  const int tiles_per_row_tile = num_walk_channel_tiles<kShared>(num_channel_tiles);
  int running = 0;
  for (int base = 0; base < rows.num_groups; base += device::kWarpSize) {
    const int group = base + lane;
    const int row_tiles =
        group < rows.num_groups ? num_group_row_tiles<kShared>(rows.count[group]) : 0;
    int inclusive =
        (kShared == Shared::channels ? row_tiles / kClusterSize : row_tiles) * tiles_per_row_tile;
    for (int distance = 1; distance < device::kWarpSize; distance *= 2) {
      const int left = __shfl_up_sync(0xffffffffU, inclusive, distance);
      if (lane >= distance) inclusive += left;
    }
    if (group < rows.num_groups) first_tile[group + 1] = running + inclusive;
    running += __shfl_sync(0xffffffffU, inclusive, device::kWarpSize - 1);
  }
  if (lane == 0) first_tile[0] = 0;
}

template <Shared kShared>
class GroupedWalk {
 public:
  __device__ GroupedWalk(const GroupedRowsArgs& rows, int num_channel_tiles,
                         const std::int32_t* first_tile, int cta_rank)
      : rows_(rows),
        first_tile_(first_tile),
        walk_channel_tiles_(num_walk_channel_tiles<kShared>(num_channel_tiles)),
        cta_rank_(cta_rank),
        next_(static_cast<int>(blockIdx.x) / kClusterSize),
        num_tiles_(first_tile[rows.num_groups]) {}

  /// Steps to the next tile; false when there is none.
  __device__ bool next(GroupedTile& tile) {
    if (next_ >= num_tiles_) return false;
    while (next_ >= first_tile_[group_ + 1]) ++group_;
    const int local = next_ - first_tile_[group_];
    next_ += static_cast<int>(gridDim.x) / kClusterSize;

    const int count = rows_.count[group_];
    const int row_tiles = num_group_row_tiles<kShared>(count);
    const int channel = local % walk_channel_tiles_;
    const int row = local / walk_channel_tiles_;
    const schedule::UnitRange units =
        schedule::unit_tile(schedule::num_row_units(count), row_tiles,
                            kShared == Shared::rows ? row : row * 2 + cta_rank_);
    tile.group = group_;
    tile.channel_tile = kShared == Shared::rows ? channel * 2 + cta_rank_ : channel;
    tile.first_row = rows_.begin[group_] + units.first * schedule::kRowsPerUnit;
    tile.num_rows = count - units.first * schedule::kRowsPerUnit;
    tile.num_units = units.count;
    return true;
  }

 private:
  const GroupedRowsArgs& rows_;
  const std::int32_t* first_tile_;
  int walk_channel_tiles_;
  int cta_rank_;
  int next_;
  int num_tiles_;
  int group_ = 0;
};

}  // namespace megamoe::products
