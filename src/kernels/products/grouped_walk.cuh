// The walk of schedule/tile_walk.h by the clusters of a kernel.
#pragma once

#include <cstdint>

#include "device/cluster.cuh"
#include "kernels/products/row_product.h"

namespace megamoe::products {

/// One warp fills first_tile[0 .. num_groups] with the running number of cluster tiles.
template <Shared kShared>
__device__ inline void count_tiles(const GroupedRowsArgs& rows, int num_channel_tiles,
                                   std::int32_t* first_tile) {
  const int lane = device::lane_idx();
  const int tiles_per_row_tile = schedule::num_walk_channel_tiles<kShared>(num_channel_tiles);
  int running = 0;
  for (int base = 0; base < rows.num_groups; base += device::kWarpSize) {
    const int group = base + lane;
    const int row_tiles =
        group < rows.num_groups ? schedule::num_group_row_tiles<kShared>(rows.count[group]) : 0;
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

struct KernelGrid {
  __device__ static int cluster() { return static_cast<int>(blockIdx.x) / kClusterSize; }
  __device__ static int num_clusters() { return static_cast<int>(gridDim.x) / kClusterSize; }
};

using EveryNthTile = schedule::EveryNth<KernelGrid>;

template <Shared kShared, class Tickets = EveryNthTile>
using GroupedWalk = schedule::GroupedWalk<kShared, Tickets>;

}  // namespace megamoe::products
