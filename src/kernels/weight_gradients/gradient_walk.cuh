// The walk over the weight gradients' tiles as their kernels take it.
#pragma once

#include "kernels/weight_gradients/weight_gradient.h"
#include "schedule/gradient_walk.h"

namespace megamoe::products {

using schedule::GradientTile;
static_assert(schedule::kMaxLineBlocks == kMaxBlocksPerTile);
static_assert(schedule::kRowsPerKBlock == kBlockK);

template <Shared kShared, GradientType kType, class Tickets>
using GradientWalk = schedule::GradientWalk<kShared, kType == GradientType::bf16,
                                            WeightGradientParams, GradientGroups, Tickets>;

}  // namespace megamoe::products
