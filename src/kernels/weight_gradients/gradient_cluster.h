// The CTAs of a cluster of the weight gradients' kernel.
#pragma once

#include "kernels/weight_gradients/weight_gradient.h"

namespace megamoe::products {

/// Which operand the CTAs of a cluster have in common: two of them one, four both.
enum class GradientShared { lines, channels, both };

/// A cluster's CTAs: `kLineTiles` x `kChannelTiles` tiles of a gradient. Tiles beside each other
/// share lines, tiles below each other channels: of what is shared each loads one half of the rows
/// for both.
template <GradientShared kShared>
struct GradientCluster {
  static constexpr int kLineTiles = kShared == GradientShared::lines ? 1 : 2;
  static constexpr int kChannelTiles = kShared == GradientShared::channels ? 1 : 2;
  static constexpr int kNumCtas = kLineTiles * kChannelTiles;
  /// Who loads into a CTA's stages: itself, and whom it shares an operand with: ranks
  /// `rank ^ i`, i < kNumSharers.
  static constexpr int kNumSharers = kNumCtas == 4 ? 3 : 2;

  MEGAMOE_HOST_DEVICE static constexpr int line_of(int rank) { return rank / kChannelTiles; }
  MEGAMOE_HOST_DEVICE static constexpr int channel_of(int rank) { return rank % kChannelTiles; }
  /// As multicast masks: the CTAs with the lines of `rank`, with its channels.
  MEGAMOE_HOST_DEVICE static constexpr std::uint16_t sharers_of_lines(int rank) {
    return static_cast<std::uint16_t>(1U << rank | 1U << (rank ^ 1));
  }
  MEGAMOE_HOST_DEVICE static constexpr std::uint16_t sharers_of_channels(int rank) {
    return static_cast<std::uint16_t>(1U << rank | 1U << (rank ^ kChannelTiles));
  }
};

/// Measuring only: 0 store, else 1 + the number of pieces brought in.
MEGAMOE_HOST_DEVICE inline bool adds(GradientUpdate update) { return static_cast<int>(update) != 0; }
MEGAMOE_HOST_DEVICE inline int num_brought_in(GradientUpdate update) {
  const int n = static_cast<int>(update) - 1;
  return n < 0 ? 0 : n;
}

}  // namespace megamoe::products
