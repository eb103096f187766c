// The experts whose weight gradients have tiles.
#pragma once

#include "device/cluster.cuh"
#include "kernels/weight_gradients/weight_gradient.h"

namespace megamoe::products {

/// One warp lists them; a CTA barrier must follow. All, or, where gradients are added, those with
/// rows: adding nothing must leave a gradient as it was, bit by bit.
__device__ inline void list_groups(const WeightGradientParams& params, GradientGroups& list) {
  const int lane = device::lane_idx();
  int num_listed = 0;
  for (int first = 0; first < params.rows.num_groups; first += device::kWarpSize) {
    const int group = first + lane;
    const bool has_tiles = group < params.rows.num_groups &&
                           (params.update == GradientUpdate::store || params.rows.count[group] > 0);
    const std::uint32_t all = __ballot_sync(0xffffffffU, has_tiles);
    const std::uint32_t before = all & ((1U << lane) - 1U);
    if (has_tiles) list.groups[num_listed + __popc(before)] = static_cast<std::uint16_t>(group);
    num_listed += __popc(all);
  }
  if (lane == 0) list.num_groups = num_listed;
}

}  // namespace megamoe::products
