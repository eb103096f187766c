// The routings of `megamoe bench`.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <set>

#include "bench/routing.h"

namespace megamoe::bench {
namespace {

constexpr MoeShape kShape{
    .max_tokens = 2000, .hidden_dim = 64, .intermediate_dim = 64, .num_experts = 32, .top_k = 4};
constexpr int kNumRanks = 2;

std::vector<std::vector<std::int32_t>> ids_of(Routing routing, std::uint64_t seed = 1) {
  return routing_ids(routing, kShape, kShape.max_tokens, kNumRanks, seed);
}

std::vector<double> shares_of_experts(const std::vector<std::vector<std::int32_t>>& ids_RTK) {
  std::vector<double> shares(kShape.num_experts);
  for (const auto& ids_TK : ids_RTK) {
    for (const std::int32_t expert : ids_TK) {
      shares[expert] += 1.0 / (kNumRanks * static_cast<double>(ids_TK.size()));
    }
  }
  std::sort(shares.rbegin(), shares.rend());
  return shares;
}

TEST(BenchRouting, TokensNameDifferentExperts) {
  for (const Routing routing : {Routing::uniform, Routing::zipf}) {
    for (const auto& ids_TK : ids_of(routing)) {
      ASSERT_EQ(ids_TK.size(), 2000U * 4);
      for (std::size_t first = 0; first < ids_TK.size(); first += 4) {
        const std::set<std::int32_t> experts(&ids_TK[first], &ids_TK[first] + 4);
        ASSERT_EQ(experts.size(), 4U);
        ASSERT_GE(*experts.begin(), 0);
        ASSERT_LT(*experts.rbegin(), 32);
      }
    }
  }
}

TEST(BenchRouting, UniformLoadsExpertsAlike) {
  const std::vector<double> shares = shares_of_experts(ids_of(Routing::uniform));
  EXPECT_NEAR(shares.front(), 1.0 / 32, 0.15 / 32);
  EXPECT_NEAR(shares.back(), 1.0 / 32, 0.15 / 32);
}

TEST(BenchRouting, ZipfLoadsTheFirstAsOften) {
  // The first draw alone: the expert with odds 1 is named with probability 1 / (1 + 1/2 + ...).
  double sum_of_odds = 0.0;
  for (int place = 1; place <= 32; ++place) sum_of_odds += 1.0 / place;
  std::vector<double> first_draws(32);
  for (const auto& ids_TK : ids_of(Routing::zipf)) {
    for (std::size_t slot = 0; slot < ids_TK.size(); slot += 4) ++first_draws[ids_TK[slot]];
  }
  std::sort(first_draws.rbegin(), first_draws.rend());
  EXPECT_NEAR(first_draws[0] / 4000, 1.0 / sum_of_odds, 0.03);
  EXPECT_NEAR(first_draws[1] / 4000, 0.5 / sum_of_odds, 0.03);
  const std::vector<double> shares = shares_of_experts(ids_of(Routing::zipf));
  EXPECT_GT(shares.front(), 4 * shares.back());
  EXPECT_LE(shares.front(), 0.25);  // once a token
}

TEST(BenchRouting, TheSeedDecides) {
  EXPECT_EQ(ids_of(Routing::zipf), ids_of(Routing::zipf));
  EXPECT_NE(ids_of(Routing::zipf), ids_of(Routing::zipf, 2));
  EXPECT_NE(ids_of(Routing::zipf)[0], ids_of(Routing::zipf)[1]);
}

TEST(BenchRouting, TheBusiestIsFound) {
  const BusiestRows one = count_busiest(kShape, ids_of(Routing::one_expert));
  EXPECT_EQ(one.of_rank, 2 * 2000 * 4);
  EXPECT_EQ(one.of_expert, 2 * 2000 * 4);
  EXPECT_EQ(one.rank, kNumRanks - 1);
  MoeShape shape = kShape;
  shape.num_experts = 4;
  const BusiestRows busiest = count_busiest(shape, {{0, 1, 2, 3}, {2, 2, 3, -1}});
  EXPECT_EQ(busiest.of_rank, 5);
  EXPECT_EQ(busiest.rank, 1);
  EXPECT_EQ(busiest.of_expert, 3);
}

TEST(BenchRouting, BytesBetweenHostsAreThoseOfTheBusiestRankAndDirection) {
  MoeShape shape = kShape;
  shape.num_experts = 4;
  shape.hidden_dim = 64;
  shape.top_k = 2;
  constexpr std::int64_t kRow = 128;
  // Rank 0: two of three tokens need the other host, for three slots. Rank 1: one, for one.
  const std::vector<std::vector<std::int32_t>> ids_RTK = {{0, 1, 2, 3, 1, 2}, {3, -1, 0, 2}};
  const Traffic traffic = busiest_between_hosts(shape, even_topology(2, 1), ids_RTK);
  EXPECT_EQ(traffic.forward_bytes, 8 + 4 * kRow);            // what rank 1 sends
  EXPECT_EQ(traffic.backward_bytes, 2 * 16 + 5 * kRow + 4);  // what rank 0 sends
  const Traffic one_host = busiest_between_hosts(shape, Topology(2), ids_RTK);
  EXPECT_EQ(one_host.forward_bytes, 0);
}

TEST(BenchRouting, NamesAreThoseOfTheOption) {
  for (const Routing routing : {Routing::uniform, Routing::zipf, Routing::one_expert}) {
    EXPECT_EQ(parse_routing(to_string(routing)), routing);
  }
  EXPECT_THROW(parse_routing("fair"), std::invalid_argument);
}

}  // namespace
}  // namespace megamoe::bench
