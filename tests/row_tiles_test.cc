// How ragged experts are cut into tiles.
#include "schedule/row_tiles.h"

#include <gtest/gtest.h>

namespace megamoe::schedule {
namespace {

TEST(RowTiles, TilesCoverEveryUnitOnceInOrder) {
  for (int num_rows = 0; num_rows <= 2000; ++num_rows) {
    const int units = num_row_units(num_rows);
    for (const int multiple : {1, 2}) {
      const int tiles = num_unit_tiles(units, kMaxUnitsPerTile, multiple);
      EXPECT_EQ(tiles % multiple, 0);
      int next = 0;
      for (int tile = 0; tile < tiles; ++tile) {
        const UnitRange range = unit_tile(units, tiles, tile);
        ASSERT_EQ(range.first, next);
        ASSERT_LE(range.count, kMaxUnitsPerTile);
        next += range.count;
      }
      EXPECT_EQ(next, units);
    }
  }
}

TEST(RowTiles, NoRowsNoTiles) {
  EXPECT_EQ(num_unit_tiles(num_row_units(0), kMaxUnitsPerTile, 2), 0);
}

TEST(RowTiles, TilesOfAnExpertDifferByAtMostOneUnit) {
  const int units = num_row_units(1000);  // 63 units in 6 tiles: three of 11, three of 10
  EXPECT_EQ(num_unit_tiles(units, kMaxUnitsPerTile, 1), 6);
  EXPECT_EQ(unit_tile(units, 6, 0).count, 11);
  EXPECT_EQ(unit_tile(units, 6, 2).count, 11);
  EXPECT_EQ(unit_tile(units, 6, 3).count, 10);
  EXPECT_EQ(unit_tile(units, 6, 5).first + unit_tile(units, 6, 5).count, 63);
}

TEST(RowTiles, AClusterThatSharesChannelsMayHaveATileWithoutRows) {
  EXPECT_EQ(num_unit_tiles(num_row_units(5), kMaxUnitsPerTile, 2), 2);
  EXPECT_EQ(unit_tile(1, 2, 0).count, 1);
  EXPECT_EQ(unit_tile(1, 2, 1).count, 0);
}

TEST(RowTiles, TheCutTailFillsWholeRounds) {
  for (int num_tiles = 1; num_tiles <= 1000; ++num_tiles) {
    for (const int workers : {1, 2, 66}) {
      const TailCut tail = cut_tail(num_tiles, workers);
      const int cut = num_tiles - tail.first;
      ASSERT_EQ(tail.first % workers, 0);
      if (cut == 0) continue;
      EXPECT_EQ(tail.denominator, cut);
      EXPECT_TRUE(tail.numerator % workers == 0 || tail.numerator == 2 * cut);
      EXPECT_GE(tail.numerator, cut);
      EXPECT_LE(tail.numerator, 2 * cut);
    }
  }
}

TEST(RowTiles, ACutTileKeepsAtLeastOneUnit) {
  const TailCut tail = cut_tail(48, 66);
  EXPECT_EQ(tail.cut(3, 63), 4);
  EXPECT_EQ(tail.cut(1, 1), 1);
  EXPECT_EQ(tail.cut(0, 0), 0);
}

}  // namespace
}  // namespace megamoe::schedule
