// The clusters of the weight gradients: every CTA gets both halves of both operands of its tile.
#include "schedule/gradient_cluster.h"

#include <gtest/gtest.h>

#include <set>
#include <utility>

namespace megamoe::schedule {
namespace {

template <GradientShared kShared>
class OfKind {
 public:
  using Cluster = GradientCluster<kShared>;
  static constexpr int kCtas = Cluster::kNumCtas;

  void check() const {
    std::set<std::pair<int, int>> tiles;
    for (int cta = 0; cta < kCtas; ++cta) {
      tiles.insert({Cluster::line_tile(cta), Cluster::channel_tile(cta)});
      EXPECT_LT(Cluster::line_tile(cta), Cluster::kLineTiles);
      EXPECT_LT(Cluster::channel_tile(cta), Cluster::kChannelTiles);
      check_operand(cta, Cluster::kSharesLines, Cluster::line_tile, Cluster::half_of_lines,
                    Cluster::ctas_with_lines);
      check_operand(cta, Cluster::kSharesChannels, Cluster::channel_tile, Cluster::half_of_channels,
                    Cluster::ctas_with_channels);
      check_loaders(cta);
    }
    EXPECT_EQ(tiles.size(), kCtas);
  }

 private:
  /// Where the operand is shared, the CTAs that load for `cta` have its tile of the operand, and
  /// load a half each.
  template <class Tile, class Half, class Mask>
  void check_operand(int cta, bool is_shared, Tile tile, Half half, Mask mask) const {
    if (!is_shared) return;
    std::multiset<int> halves;
    for (int loader = 0; loader < kCtas; ++loader) {
      if ((mask(loader) >> cta & 1) == 0) continue;
      EXPECT_EQ(tile(loader), tile(cta)) << loader << " loads for " << cta;
      halves.insert(half(loader));
    }
    EXPECT_EQ(halves, (std::multiset<int>{0, 1})) << "CTA " << cta;
    EXPECT_EQ(mask(cta) >> kCtas, 0) << "CTA " << cta;
  }

  void check_loaders(int cta) const {
    std::set<int> told;
    for (int i = 0; i < Cluster::kNumLoaders; ++i) told.insert(cta ^ i);
    std::set<int> loaders = {cta};
    for (int other = 0; other < kCtas; ++other) {
      const bool loads =
          (Cluster::kSharesLines && (Cluster::ctas_with_lines(other) >> cta & 1)) ||
          (Cluster::kSharesChannels && (Cluster::ctas_with_channels(other) >> cta & 1));
      if (loads) loaders.insert(other);
    }
    EXPECT_EQ(told, loaders) << "CTA " << cta;
  }
};

TEST(GradientCluster, PairsThatShareLines) { OfKind<GradientShared::lines>().check(); }
TEST(GradientCluster, PairsThatShareChannels) { OfKind<GradientShared::channels>().check(); }
TEST(GradientCluster, FoursThatShareBoth) {
  OfKind<GradientShared::both>().check();
  EXPECT_EQ(GradientCluster<GradientShared::both>::kNumCtas, 4);
}

}  // namespace
}  // namespace megamoe::schedule
