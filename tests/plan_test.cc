// The plan against a naive one over random routings: order of rows, pull lists, offsets, padding,
// bad ids.
#include "routing/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "sanitized.h"

namespace megamoe {
namespace {

struct Group {
  RoutingDims dims;
  std::vector<std::vector<std::int32_t>> ids;  // [R][T*K]
  std::vector<std::int32_t> counts_RE;
};

std::int64_t num_tokens(const Group& group, int rank) {
  return static_cast<std::int64_t>(group.ids[rank].size()) / group.dims.top_k;
}

Group random_group(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto pick = [&](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random);
  };
  Group group;
  group.dims.num_ranks = pick(1, 5);
  group.dims.num_experts = group.dims.num_ranks * pick(1, 6);
  group.dims.top_k = pick(1, 6);
  const int hole_percent = pick(0, 3) * 20;
  const int popular = pick(0, group.dims.num_experts - 1);
  group.counts_RE.assign(group.dims.num_ranks * group.dims.num_experts, 0);
  for (int rank = 0; rank < group.dims.num_ranks; ++rank) {
    std::vector<std::int32_t> ids(pick(0, 3) == 0 ? 0 : pick(1, 40) * group.dims.top_k);
    for (std::int32_t& id : ids) {
      const int dice = pick(0, 99);
      id = dice < hole_percent ? -1 : dice < 70 ? pick(0, group.dims.num_experts - 1) : popular;
    }
    const IdFault fault =
        count_slots(group.dims, ids.data(), ids.size() / group.dims.top_k, group.dims.top_k,
                    group.counts_RE.data() + rank * group.dims.num_experts);
    EXPECT_FALSE(fault.found());
    group.ids.push_back(std::move(ids));
  }
  return group;
}

using Place = std::tuple<int, std::int64_t, int>;  // source, token, slot

/// The row of every slot, by sorting: (destination, row) for each (source, token, slot).
std::map<Place, std::pair<int, std::int64_t>> naive_rows(const Group& group,
                                                         std::int64_t alignment) {
  std::map<Place, std::pair<int, std::int64_t>> rows;
  for (int destination = 0; destination < group.dims.num_ranks; ++destination) {
    std::int64_t row = 0;
    for (int i = 0; i < group.dims.experts_per_rank(); ++i) {
      row = (row + alignment - 1) / alignment * alignment;
      const int expert = group.dims.first_expert_of(destination) + i;
      for (int source = 0; source < group.dims.num_ranks; ++source) {
        for (std::size_t at = 0; at < group.ids[source].size(); ++at) {
          if (group.ids[source][at] != expert) continue;
          rows[{source, at / group.dims.top_k, at % group.dims.top_k}] = {destination, row++};
        }
      }
    }
  }
  return rows;
}

struct OwnedLists {
  OwnedLists(const RoutingDims& dims, std::int64_t tokens)
      : begin(dims.num_ranks + 1, -1),
        pulls(max_pull_tokens(dims, tokens)),
        slots(tokens * dims.top_k),
        lists{begin.data(), pulls.data(), slots.data()} {}
  std::vector<std::int64_t> begin;
  std::vector<PullToken> pulls;
  std::vector<PullSlot> slots;
  PullLists lists;
};

void check_lists(const Group& group, int source, const OwnedLists& owned, std::int64_t alignment) {
  const auto expected = naive_rows(group, alignment);
  std::size_t num_slots_seen = 0;
  for (int destination = 0; destination < group.dims.num_ranks; ++destination) {
    std::set<std::int32_t> tokens_seen;
    std::pair<std::int32_t, std::int32_t> last{-1, -1};
    for (std::int64_t i = owned.begin[destination]; i < owned.begin[destination + 1]; ++i) {
      const PullToken& pull = owned.pulls[i];
      EXPECT_TRUE(tokens_seen.insert(pull.token).second) << "a token is fetched twice";
      ASSERT_GE(pull.num_slots, 1);
      std::int32_t first_expert = group.dims.num_experts;
      for (std::int32_t s = 0; s < pull.num_slots; ++s) {
        const PullSlot& slot = owned.slots[pull.first_slot + s];
        const auto found = expected.find({source, pull.token, slot.slot});
        ASSERT_NE(found, expected.end());
        EXPECT_EQ(found->second, std::make_pair(destination, slot.row));
        EXPECT_EQ(slot.expert, group.ids[source][pull.token * group.dims.top_k + slot.slot]);
        first_expert = std::min(first_expert, slot.expert);
        ++num_slots_seen;
      }
      const std::pair<std::int32_t, std::int32_t> key{first_expert, pull.token};
      EXPECT_LT(last, key) << "order is by first expert needed, then by token";
      last = key;
    }
  }
  const auto present = std::count_if(group.ids[source].begin(), group.ids[source].end(),
                                     [](std::int32_t id) { return id >= 0; });
  EXPECT_EQ(num_slots_seen, static_cast<std::size_t>(present));
}

TEST(Plan, AgreesWithANaivePlanOnThousandsOfRandomRoutings) {
  PlanScratch scratch;
  for (std::uint64_t seed = 0; seed < less_if_sanitized<std::uint64_t>(2000, 200); ++seed) {
    SCOPED_TRACE(seed);
    const Group group = random_group(seed);
    const std::int64_t alignment = seed % 3 == 0 ? 1 : seed % 3 == 1 ? 8 : 64;
    for (int source = 0; source < group.dims.num_ranks; ++source) {
      OwnedLists owned(group.dims, num_tokens(group, source));
      build_pull_lists(group.dims, group.counts_RE.data(), source, group.ids[source], alignment,
                       scratch, owned.lists);
      check_lists(group, source, owned, alignment);
    }
    if (HasFailure()) return;
  }
}

TEST(Plan, OffsetsOfExpertsArePaddedAndCoverTheRows) {
  for (std::uint64_t seed = 0; seed < less_if_sanitized<std::uint64_t>(500, 50); ++seed) {
    const Group group = random_group(seed);
    std::int64_t total = 0;
    for (int rank = 0; rank < group.dims.num_ranks; ++rank) {
      std::vector<std::int64_t> begin(group.dims.experts_per_rank() + 1);
      expert_offsets(group.dims, group.counts_RE.data(), rank, 64, begin.data());
      EXPECT_EQ(begin[0], 0);
      for (int i = 0; i < group.dims.experts_per_rank(); ++i) {
        const std::int64_t rows = rows_of_expert(group.dims, group.counts_RE.data(),
                                                 group.dims.first_expert_of(rank) + i);
        EXPECT_EQ(begin[i] % 64, 0);
        EXPECT_EQ(begin[i + 1], (begin[i] + rows + 63) / 64 * 64);
      }
      total += rows_received(group.dims, group.counts_RE.data(), rank);
    }
    std::int64_t present = 0;
    for (const auto& ids : group.ids) {
      present += std::count_if(ids.begin(), ids.end(), [](std::int32_t id) { return id >= 0; });
    }
    EXPECT_EQ(total, present);
  }
}

TEST(Plan, RowsDoNotDependOnHowTokensAreSplitOverRanks) {
  // One source rank with all tokens against four with a quarter each: the order within every expert
  // is the same.
  std::mt19937 random(7);
  const RoutingDims dims{4, 8, 3};
  std::vector<std::int32_t> all(40 * 3);
  for (auto& id : all) id = std::uniform_int_distribution<int>(-1, 7)(random);
  Group split{dims, {}, {}};
  for (int rank = 0; rank < 4; ++rank) {
    split.ids.emplace_back(all.begin() + rank * 30, all.begin() + (rank + 1) * 30);
  }
  Group whole{{1, 8, 3}, {all}, {}};
  const auto split_rows = naive_rows(split, 1);
  const auto whole_rows = naive_rows(whole, 1);
  std::vector<std::pair<std::pair<int, std::int64_t>, Place>> split_order;
  for (const auto& [place, row] : split_rows) {
    const auto& [source, token, slot] = place;
    split_order.emplace_back(row, Place{0, source * 10 + token, slot});
  }
  std::vector<std::pair<std::int64_t, Place>> whole_order;
  for (const auto& [place, row] : whole_rows) whole_order.emplace_back(row.second, place);
  std::sort(split_order.begin(), split_order.end());
  std::sort(whole_order.begin(), whole_order.end());
  ASSERT_EQ(split_order.size(), whole_order.size());
  for (std::size_t i = 0; i < whole_order.size(); ++i) {
    EXPECT_EQ(split_order[i].second, whole_order[i].second);
  }
}

TEST(Plan, BadIdsAreFoundWithTheirPlace) {
  const RoutingDims dims{1, 4, 2};
  std::vector<std::int32_t> counts(4);
  const std::vector<std::int32_t> too_large{0, -1, 3, 4, 9, 1};
  const IdFault fault = count_slots(dims, too_large.data(), 3, 2, counts.data());
  EXPECT_EQ(fault.token, 1);
  EXPECT_EQ(fault.slot, 1);
  EXPECT_EQ(fault.value, 4);
  const std::vector<std::int32_t> below{0, 1, -2, 1};
  EXPECT_EQ(count_slots(dims, below.data(), 2, 2, counts.data()).value, -2);
  EXPECT_EQ(counts, (std::vector<std::int32_t>{1, 2, 0, 0}));
}

TEST(Plan, RowNumbersPass32Bits) {
  // 40 ranks of 2^26 slots each to one expert: the offsets are sums of counts, no memory is needed.
  const RoutingDims dims{40, 40, 1};
  std::vector<std::int32_t> counts_RE(40 * 40, 0);
  for (int rank = 0; rank < 40; ++rank) counts_RE[rank * 40] = 1 << 26;
  EXPECT_EQ(rows_received(dims, counts_RE.data(), 0), std::int64_t{40} << 26);
  EXPECT_EQ(source_begin(dims, counts_RE.data(), 39, 0, 0), std::int64_t{39} << 26);
}

}  // namespace
}  // namespace megamoe
