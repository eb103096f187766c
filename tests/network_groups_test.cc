// The cost model of groups of experts: more of them on slow networks and for many tokens.
#include "schedule/network_groups.h"

#include <gtest/gtest.h>

namespace megamoe::schedule {
namespace {

constexpr int kMost = 8;

NetworkLoad qwen3_235b(double bytes_per_s, std::int64_t num_tokens = 8192) {
  return {.num_hosts = 2,
          .num_tokens = num_tokens,
          .top_k = 8,
          .row_bytes = 8192,
          .bytes_per_s = bytes_per_s};
}

TEST(NetworkGroups, ExposeTheFirstRowsAndTheLastResults) {
  NetworkLoad load = qwen3_235b(1e9);
  load.top_k = 1;
  // One slot a token: half of the tokens cross, and half of the slots come back.
  const double all_s = (4096.0 + 4096.0) * 8192.0 / 1e9;
  EXPECT_NEAR(exposed_s(load, 1), all_s + kGroupCostS, 1e-9);
  EXPECT_NEAR(exposed_s(load, 4), all_s / 4 + 4 * kGroupCostS, 1e-9);
}

TEST(NetworkGroups, AreAsManyAsThereMayBeOnASlowNetworkAndOneWhereNothingIsLong) {
  EXPECT_EQ(choose_num_groups(qwen3_235b(1e9), kMost), kMost);
  EXPECT_EQ(choose_num_groups(qwen3_235b(1e9), 3), 3);
  EXPECT_EQ(choose_num_groups(qwen3_235b(1e9, 4), kMost), 1);
  EXPECT_EQ(choose_num_groups(qwen3_235b(1e9, 0), kMost), 1);
  EXPECT_EQ(choose_num_groups(qwen3_235b(0.0), kMost), 1);
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
