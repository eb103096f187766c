// What overlapped kernels wait for, and in what order tokens are pulled.
#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "schedule/pull_order.h"
#include "schedule/row_blocks.h"

namespace megamoe::schedule {
namespace {

TEST(RowBlocks, HoldExactlyTheRows) {
  for (int first = 0; first < 300; ++first) {
    for (int num_rows = 0; num_rows <= 192; ++num_rows) {
      const BlockRange range = blocks_of_rows(first, num_rows);
      ASSERT_EQ(range.count == 0, num_rows == 0);
      if (num_rows == 0) continue;
      ASSERT_LE(range.first * kRowsPerBlock, first);
      ASSERT_GT((range.first + 1) * kRowsPerBlock, first);
      const int end = (range.first + range.count) * kRowsPerBlock;
      ASSERT_GE(end, first + num_rows);
      ASSERT_LT(end - kRowsPerBlock, first + num_rows);
      ASSERT_LE(range.count, 4);
    }
  }
}

TEST(RowBlocks, PadsAndRowsFillEveryBlock) {
  for (int num_rows = 0; num_rows <= 1000; ++num_rows) {
    const int num_blocks = ceil_div(num_rows, kRowsPerBlock);
    std::vector<int> arrived(num_blocks);
    for (int block = 0; block < num_blocks; ++block) {
      arrived[block] = num_pads_of_block(num_rows, block);
    }
    for (int row = 0; row < num_rows; ++row) ++arrived[block_of_row(row)];
    for (const int rows : arrived) ASSERT_EQ(rows, kRowsPerBlock);
  }
}

/// A tile of an expert touches only blocks that the expert has.
TEST(RowBlocks, TilesStayWithinTheirExpert) {
  for (int num_rows = 1; num_rows <= 1000; ++num_rows) {
    const int units = num_row_units(num_rows);
    const int tiles = num_unit_tiles(units, kMaxUnitsPerTile, 1);
    for (int tile = 0; tile < tiles; ++tile) {
      const UnitRange range = unit_tile(units, tiles, tile);
      const BlockRange blocks =
          blocks_of_rows(range.first * kRowsPerUnit, range.count * kRowsPerUnit);
      ASSERT_LE(blocks.first + blocks.count, ceil_div(num_rows, kRowsPerBlock));
    }
  }
}

/// Random lists of `num_ranks` sources for one rank.
struct Lists {
  Lists(int num_ranks, int num_experts, int most, std::mt19937& random) {
    for (int source = 0; source < num_ranks; ++source) {
      std::vector<int> begin = {static_cast<int>(random() % 1000)};
      for (int expert = 0; expert < num_experts; ++expert) {
        const bool empty = random() % 4 == 0;
        begin.push_back(begin.back() + (empty ? 0 : static_cast<int>(random() % (most + 1))));
      }
      begins.push_back(begin);
    }
  }
  [[nodiscard]] int operator()(int source, int expert) const { return begins[source][expert]; }
  std::vector<std::vector<int>> begins;
};

struct Pulled {
  int source = -1;
  int token_idx = 0;
  int expert = 0;
};

TEST(PullOrder, IsByExpertAndTakesSourcesInTurn) {
  std::mt19937 random(3);
  for (int repeat = 0; repeat < 300; ++repeat) {
    const int num_ranks = 1 + static_cast<int>(random() % 9);
    const int num_experts = 1 + static_cast<int>(random() % 9);
    const int rank = static_cast<int>(random() % num_ranks);
    const Lists lists(num_ranks, num_experts, static_cast<int>(random() % 20), random);
    const auto begin = [&](int source, int expert) { return lists(source, expert); };
    const PullOrder order(num_ranks, rank, num_experts, begin);
    std::vector<Pulled> pulled(order.num_tokens());
    for (int source = 0; source < num_ranks; ++source) {
      for (int i = 0; i < order.num_tokens_of(source); ++i) {
        const int place = order.place_of(source, i);
        ASSERT_GE(place, 0);
        ASSERT_LT(place, order.num_tokens());
        ASSERT_EQ(pulled[place].source, -1) << "two tokens in one place";
        pulled[place] = {source, i, order.expert_of(source, i)};
        ASSERT_GE(begin(source, 0) + i, begin(source, pulled[place].expert));
        ASSERT_LT(begin(source, 0) + i, begin(source, pulled[place].expert + 1));
      }
    }
    std::vector<int> next(num_ranks, 0);
    for (std::size_t place = 0; place < pulled.size(); ++place) {
      const Pulled& now = pulled[place];
      ASSERT_EQ(now.token_idx, next[now.source]++) << "a source's list is not in order";
      if (place == 0) continue;
      const Pulled& before = pulled[place - 1];
      ASSERT_LE(before.expert, now.expert);
      if (before.expert != now.expert) continue;
      const auto round = [&](const Pulled& p) {
        return begin(p.source, 0) + p.token_idx - begin(p.source, p.expert);
      };
      const auto turn = [&](const Pulled& p) { return source_turn(num_ranks, rank, p.source); };
      const bool same_round = round(before) == round(now) && turn(before) < turn(now);
      const bool next_round = round(before) + 1 == round(now);
      ASSERT_TRUE(same_round || next_round);
    }
  }
}

TEST(PullOrder, BeginsWithTheRankItself) {
  EXPECT_EQ(source_turn(4, 2, 2), 0);
  EXPECT_EQ(source_turn(4, 2, 3), 1);
  EXPECT_EQ(source_turn(4, 2, 0), 2);
  EXPECT_EQ(source_turn(4, 2, 1), 3);
}

}  // namespace
}  // namespace megamoe::schedule
