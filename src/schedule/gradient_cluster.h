// The clusters of the weight gradients: which tiles their CTAs have, and which of them load an
// operand together. Shared by the kernels and the CPU tests.
#pragma once

#include <cstdint>

#include "megamoe/bf16.h"  // MEGAMOE_HOST_DEVICE

namespace megamoe::schedule {

/// The operands that a CTA shares with another one: a cluster is a pair with one of them, or four
/// CTAs with both.
enum class GradientShared { lines, channels, both };

/// A cluster's CTAs: kLineTiles x kChannelTiles tiles of a gradient, in rows. Neighbours in a row
/// have the same lines, neighbours in a column the same channels: each loads half of what is
/// shared, for both.
template <GradientShared kShared>
struct GradientCluster {
  static constexpr int kLineTiles = kShared == GradientShared::lines ? 1 : 2;
  static constexpr int kChannelTiles = kShared == GradientShared::channels ? 1 : 2;
  static constexpr int kNumCtas = kLineTiles * kChannelTiles;
  static constexpr bool kSharesLines = kChannelTiles == 2;
  static constexpr bool kSharesChannels = kLineTiles == 2;
  /// CTAs that load into the stages of CTA `rank`, itself among them: `rank ^ i`, i < kNumLoaders.
  static constexpr int kNumLoaders = kLineTiles + kChannelTiles - 1;

  MEGAMOE_HOST_DEVICE static constexpr int line_tile(int rank) { return rank / kChannelTiles; }
  MEGAMOE_HOST_DEVICE static constexpr int channel_tile(int rank) { return rank % kChannelTiles; }

  /// Which half of shared lines the CTA loads, and into which CTAs, as a mask.
  MEGAMOE_HOST_DEVICE static constexpr int half_of_lines(int rank) { return channel_tile(rank); }
  MEGAMOE_HOST_DEVICE static constexpr std::uint16_t ctas_with_lines(int rank) {
    return static_cast<std::uint16_t>(1U << rank | 1U << (rank ^ 1));
  }
  MEGAMOE_HOST_DEVICE static constexpr int half_of_channels(int rank) { return line_tile(rank); }
  MEGAMOE_HOST_DEVICE static constexpr std::uint16_t ctas_with_channels(int rank) {
    return static_cast<std::uint16_t>(1U << rank | 1U << (rank ^ kChannelTiles));
  }
};

}  // namespace megamoe::schedule
