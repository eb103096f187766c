// The ring by which the roles of a cluster learn their tiles (kernels/products/tile_tickets.cuh),
// with the roles of the weight gradients that are added into fp32, which wait for each other most:
// warpgroups in turns, store warps that look a tile ahead. Whether an agent can go on depends on
// counts that only grow, so all orders end alike, and one is enough to see whether all reach the
// end.
#include "kernels/products/ticket_ring.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <random>
#include <vector>

#include "kernels/products/pieces.h"

namespace megamoe::products {
namespace {

constexpr int kStages = 4;
constexpr int kPieces = 4;
using Pieces = PieceNumbering<kPieces>;

struct Tile {
  int num_blocks = 1;
  bool is_skipped = false;  ///< as experts without rows would be, if they had tiles
};

struct Cta {
  int loaded = 0;    ///< blocks
  int consumed = 0;  ///< by the warpgroup whose turn it is
  int main_loops = 0;
  int granted[kNumMathWarpgroups][Pieces::kNumSlots] = {};
  int filled[Pieces::kNumSlots] = {};
};

struct Cluster {
  std::vector<Tile> tiles;
  int num_dealt = 0;
  std::vector<int> num_read;  ///< of each reader
  Cta ctas[kClusterSize];
};

class Reader {
 public:
  explicit Reader(Cluster& cluster)
      : cluster_(cluster), index_(static_cast<int>(cluster.num_read.size())) {
    cluster.num_read.push_back(0);
  }
  /// Reads tickets as far as they are there, past skipped tiles: true once it has a tile, or none
  /// where the tiles end.
  bool read(std::optional<Tile>& tile) {
    for (int& number = cluster_.num_read[index_]; number < cluster_.num_dealt; has_moved_ = true) {
      if (number == static_cast<int>(cluster_.tiles.size())) {
        tile.reset();
        return true;
      }
      const Tile& next = cluster_.tiles[number++];
      if (next.is_skipped) continue;
      tile = next;
      return true;
    }
    return false;
  }
  bool take_moved() { return std::exchange(has_moved_, false); }

 protected:
  Cluster& cluster_;
  bool has_moved_ = false;

 private:
  int index_;
};

/// A role: step() goes on as far as it can, and says whether it got anywhere.
class Loader : public Reader {
 public:
  Loader(Cluster& cluster, int rank) : Reader(cluster), own_(cluster.ctas[rank]), rank_(rank) {}
  bool step() {
    for (; !is_done_; has_moved_ = true) {
      if (!tile_) {
        if (rank_ == 0) deal();
        if (!read(tile_)) return take_moved();
        is_done_ = !tile_;
        continue;
      }
      const int released = std::min(cluster_.ctas[0].consumed, cluster_.ctas[1].consumed);
      if (own_.loaded - released == kStages) break;
      ++own_.loaded;
      if (++num_blocks_ < tile_->num_blocks) continue;
      num_blocks_ = 0;
      tile_.reset();
    }
    return take_moved();
  }
  [[nodiscard]] bool is_done() const { return is_done_; }

 private:
  /// The ticket that this role reads next.
  void deal() {
    if (cluster_.num_dealt > static_cast<int>(cluster_.tiles.size())) return;
    const int read_by_all = *std::min_element(cluster_.num_read.begin(), cluster_.num_read.end());
    if (cluster_.num_dealt - read_by_all == kTicketSlots) return;
    if (cluster_.num_dealt > cluster_.num_read[0]) return;
    ++cluster_.num_dealt;
    has_moved_ = true;
  }

  Cta& own_;
  int rank_;
  std::optional<Tile> tile_;
  int num_blocks_ = 0;
  bool is_done_ = false;
};

class Multiplier : public Reader {
 public:
  Multiplier(Cluster& cluster, int rank, int warpgroup)
      : Reader(cluster), own_(cluster.ctas[rank]), warpgroup_(warpgroup) {}
  bool step() {
    for (; !is_done_; has_moved_ = true) {
      if (!tile_) {
        if (!read(tile_)) return take_moved();
        is_done_ = !tile_;
        if (tile_ && number_++ % kNumMathWarpgroups != warpgroup_) tile_.reset();
        continue;
      }
      if (num_blocks_ < tile_->num_blocks) {
        const bool is_turn = own_.main_loops == number_ - 1;
        const int arrived = std::min(cluster_.ctas[0].loaded, cluster_.ctas[1].loaded);
        if (!is_turn || own_.consumed == arrived) break;
        ++own_.consumed;
        if (++num_blocks_ == tile_->num_blocks) ++own_.main_loops;
        continue;
      }
      const int slot = Pieces::number_of(warpgroup_, num_pieces_) % Pieces::kNumSlots;
      if (own_.granted[warpgroup_][slot] == num_uses_[slot]) break;
      ++num_uses_[slot];
      ++own_.filled[slot];
      if (++num_pieces_ < kPieces) continue;
      num_blocks_ = num_pieces_ = 0;
      tile_.reset();
    }
    return take_moved();
  }
  [[nodiscard]] bool is_done() const { return is_done_; }

 private:
  Cta& own_;
  int warpgroup_;
  std::optional<Tile> tile_;
  int number_ = 0;
  int num_blocks_ = 0;
  int num_pieces_ = 0;
  int num_uses_[Pieces::kNumSlots] = {};
  bool is_done_ = false;
};

/// Knows the next tile before it stores the present one: it grants that one its slots.
class Storer : public Reader {
 public:
  Storer(Cluster& cluster, int rank, int slot)
      : Reader(cluster), own_(cluster.ctas[rank]), slot_(slot), number_(slot) {}
  bool step() {
    for (; !is_done_; has_moved_ = true) {
      if (!has_first_) {
        if (!read(tile_)) return take_moved();
        has_first_ = true;
        is_done_ = !tile_;
        if (tile_) ++own_.granted[0][slot_];
        continue;
      }
      if (!has_next_) {
        if (!read(next_)) return take_moved();
        has_next_ = true;
        continue;
      }
      if (own_.filled[slot_] == num_stored_) break;
      ++num_stored_;
      const bool is_last = number_ % kPieces + Pieces::kNumSlots >= kPieces;
      if (!is_last || next_) ++own_.granted[Pieces::next_warpgroup_of(number_)][slot_];
      number_ = (number_ + Pieces::kNumSlots) % Pieces::kPerTile;
      if (!is_last) continue;
      tile_ = next_;
      has_next_ = false;
      is_done_ = !tile_;
    }
    return take_moved();
  }
  [[nodiscard]] bool is_done() const { return is_done_; }

 private:
  Cta& own_;
  int slot_;
  int number_;
  std::optional<Tile> tile_;
  std::optional<Tile> next_;
  bool has_first_ = false;
  bool has_next_ = false;
  int num_stored_ = 0;
  bool is_done_ = false;
};

/// Whether every role of both CTAs comes to the end of the tiles.
bool all_end(std::vector<Tile> tiles) {
  Cluster cluster{std::move(tiles), 0, {}, {}};
  std::vector<Loader> loaders;
  std::vector<Multiplier> multipliers;
  std::vector<Storer> storers;
  for (int rank = 0; rank < kClusterSize; ++rank) {
    loaders.emplace_back(cluster, rank);
    for (int i = 0; i < kNumMathWarpgroups; ++i) multipliers.emplace_back(cluster, rank, i);
    for (int i = 0; i < kNumStoreWarps; ++i) storers.emplace_back(cluster, rank, i);
  }
  const auto on_all = [&](const auto& does) {
    int count = 0;
    for (auto& role : loaders) count += does(role) ? 1 : 0;
    for (auto& role : multipliers) count += does(role) ? 1 : 0;
    for (auto& role : storers) count += does(role) ? 1 : 0;
    return count;
  };
  while (on_all([](auto& role) { return role.step(); }) > 0) {
  }
  return on_all([](auto& role) { return !role.is_done(); }) == 0;
}

TEST(TicketRing, EveryRoleComesToTheEnd) {
  std::mt19937 random(3);
  for (int num_tiles = 0; num_tiles < 100; ++num_tiles) {
    std::vector<Tile> tiles(num_tiles);
    for (Tile& tile : tiles) tile.num_blocks = 1 + static_cast<int>(random() % 9);
    EXPECT_TRUE(all_end(tiles)) << num_tiles;
  }
}

/// So list_groups() leaves experts without rows out.
TEST(TicketRing, MoreSkippedTilesThanSlotsWouldStopThem) {
  for (const int num_skipped : {1, kTicketSlots / 2, kTicketSlots + 2, 40}) {
    std::vector<Tile> tiles(4);
    tiles.insert(tiles.end(), num_skipped, {0, true});
    tiles.insert(tiles.end(), 4, {});
    EXPECT_EQ(all_end(tiles), num_skipped < kTicketSlots) << num_skipped;
  }
}

}  // namespace
}  // namespace megamoe::products
