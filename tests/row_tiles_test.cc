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

}  // namespace
}  // namespace megamoe::schedule
