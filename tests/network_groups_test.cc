// How experts are cut into groups, and the cost model of their number: more of them on slow
// networks and for many tokens.
#include "schedule/network_groups.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "schedule/expert_groups.h"

namespace megamoe::schedule {
namespace {

constexpr int kMost = 8;

NetworkLoad qwen3_235b(double bytes_per_s, std::int64_t num_tokens = 8192) {
  return {.num_hosts = 2,
          .num_tokens = num_tokens,
          .top_k = 8,
          .experts_per_rank = 48,
          .row_bytes = 8192,
          .bytes_per_s = bytes_per_s};
}

TEST(NetworkGroups, ExposeTheFirstRowsAndTheLastResults) {
  NetworkLoad load = qwen3_235b(1e9);
  load.top_k = 1;
  // One slot a token: half of the tokens cross, and half of the slots come back.
  const double all_s = (4096.0 + 4096.0) * 8192.0 / 1e9;
  EXPECT_NEAR(exposed_s(load, 1), all_s + kGroupCostS, 1e-9);
  // Of 48 experts the first group has 8, and so has the last.
  EXPECT_NEAR(exposed_s(load, 4), all_s / 6 + 4 * kGroupCostS, 1e-9);
}

TEST(ExpertGroups, CoverAllExpertsAndAreSmallAtTheEnds) {
  for (std::int32_t num_experts = 1; num_experts <= 512; ++num_experts) {
    for (std::int32_t num_groups = 1; num_groups <= std::min(kMost, num_experts); ++num_groups) {
      const ExpertGroups groups{num_experts, num_groups};
      std::int32_t expert = 0;
      std::int32_t largest = 0;
      for (std::int32_t group = 0; group < num_groups; ++group) {
        ASSERT_EQ(groups.begin(group), expert) << num_experts << " experts, " << num_groups;
        ASSERT_GT(groups.size(group), 0) << num_experts << " experts, " << num_groups;
        largest = std::max(largest, groups.size(group));
        for (; expert < groups.begin(group + 1); ++expert) {
          ASSERT_EQ(groups.group_of(expert), group) << num_experts << " experts, " << num_groups;
        }
      }
      ASSERT_EQ(expert, num_experts);
      if (num_groups < 3) continue;
      EXPECT_LE(groups.size(0), (largest + 2) / 2);
      EXPECT_LE(groups.size(num_groups - 1), (largest + 2) / 2);
    }
  }
  const ExpertGroups five{8, 5};  // 1, 2, 2, 2, 1
  for (const std::int32_t group : {0, 1, 2, 3, 4}) {
    EXPECT_EQ(five.size(group), group % 4 == 0 ? 1 : 2) << group;
  }
}

TEST(NetworkGroups, AreAsManyAsThereMayBeOnASlowNetworkAndOneWhereNothingIsLong) {
  EXPECT_EQ(choose_num_groups(qwen3_235b(1e9), kMost), kMost);
  EXPECT_EQ(choose_num_groups(qwen3_235b(1e9), 3), 3);
  EXPECT_EQ(choose_num_groups(qwen3_235b(1e9, 4), kMost), 1);
  EXPECT_EQ(choose_num_groups(qwen3_235b(1e9, 0), kMost), 1);
  EXPECT_EQ(choose_num_groups(qwen3_235b(0.0), kMost), 1);
}

TEST(NetworkGroups, AreNoMoreThanMakeTheirEndsSmaller) {
  // With five groups the first and the last of eight experts are groups by themselves.
  NetworkLoad load = qwen3_235b(1e9);
  load.experts_per_rank = 8;
  EXPECT_EQ(choose_num_groups(load, kMost), 5);
}

TEST(NetworkGroups, GrowFewerAsTheNetworkGrowsFaster) {
  int last = kMost;
  for (const double bytes_per_s : {1e9, 5e9, 12.5e9, 50e9, 400e9, 10e12}) {
    const int groups = choose_num_groups(qwen3_235b(bytes_per_s), kMost);
    EXPECT_LE(groups, last) << bytes_per_s;
    last = groups;
  }
  EXPECT_EQ(last, 1);
}

}  // namespace
}  // namespace megamoe::schedule
