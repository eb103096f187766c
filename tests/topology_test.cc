// Which ranks share a host, what is refused, and what a call moves between hosts.
#include "megamoe/topology.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "megamoe/error.h"
#include "routing/crossing.h"

namespace megamoe {
namespace {

Error refusal_of(const std::vector<std::string>& host_names_R) {
  try {
    const Topology topology(host_names_R);
  } catch (const Error& error) {
    return error;
  }
  return {ErrorCode::internal, "accepted"};
}

TEST(Topology, NumbersRanksHostByHost) {
  const Topology topology({"alpha", "alpha", "beta", "beta", "gamma", "gamma"});
  EXPECT_EQ(topology.num_ranks(), 6);
  EXPECT_EQ(topology.num_hosts(), 3);
  EXPECT_EQ(topology.ranks_per_host(), 2);
  EXPECT_EQ(topology.host_of(3), 1);
  EXPECT_EQ(topology.local_index_of(3), 1);
  EXPECT_EQ(topology.rank_of(2, 1), 5);
  EXPECT_EQ(topology.host_name(2), "gamma");
  EXPECT_EQ(topology.reach(2, 2), Reach::own);
  EXPECT_EQ(topology.reach(2, 3), Reach::load_store);
  EXPECT_EQ(topology.reach(2, 1), Reach::network);
  EXPECT_EQ(topology.describe(),
            "6 ranks on 3 hosts: ranks 0-1 on alpha; ranks 2-3 on beta; ranks 4-5 on gamma; by "
            "load/store inside a host; by network between hosts");
}

TEST(Topology, OneHostAndOneRankAHost) {
  EXPECT_EQ(Topology(4).num_hosts(), 1);
  EXPECT_EQ(Topology(4).reach(0, 3), Reach::load_store);
  EXPECT_EQ(even_topology(3, 1).describe(),
            "3 ranks on 3 hosts: rank 0 on host 0; rank 1 on host 1; rank 2 on host 2; by network "
            "between hosts");
}

TEST(Topology, WhatDoesNotFitIsRefusedByName) {
  const Error scattered = refusal_of({"alpha", "beta", "alpha", "beta"});
  EXPECT_EQ(scattered.code(), ErrorCode::unsupported);
  EXPECT_STREQ(scattered.what(),
               "the ranks of a host must be contiguous: alpha has rank 0 and rank 2, but not rank "
               "1, on beta (number the ranks host by host)");
  const Error uneven = refusal_of({"alpha", "alpha", "beta"});
  EXPECT_EQ(uneven.code(), ErrorCode::unsupported);
  EXPECT_STREQ(uneven.what(),
               "all hosts must hold equally many ranks: alpha holds ranks 0-1, beta holds rank 2");
  EXPECT_EQ(refusal_of({}).code(), ErrorCode::invalid_argument);
  EXPECT_STREQ(refusal_of({"alpha", ""}).what(), "rank 1 names no host (the name is empty)");
  EXPECT_THROW(Topology(0), Error);
}

/// 2 hosts with 2 ranks each, 2 experts a rank: experts 0-3 on host 0, 4-7 on host 1.
constexpr HostRouting kRouting{{4, 8, 3}, 2};

TEST(Crossing, ATokenCrossesOnceHoweverManyOfItsExpertsAreThere) {
  const std::vector<std::int32_t> ids_TK = {
      4,  5,  7,   // only to host 1
      0,  6,  6,   // to both, twice to one expert
      -1, -1, -1,  // nowhere
      3,  -1, 1,   // only to host 0
      -1, 7,  -1,
  };
  std::vector<std::int32_t> counts_S(2, -1);
  count_crossing_tokens(kRouting, ids_TK, counts_S.data());
  EXPECT_EQ(counts_S, (std::vector<std::int32_t>{2, 3}));

  std::vector<std::int32_t> tokens(5);
  tokens.resize(list_crossing_tokens(kRouting, 1, ids_TK, tokens.data()));
  EXPECT_EQ(tokens, (std::vector<std::int32_t>{0, 1, 4}));

  std::vector<std::int32_t> slots(15);
  slots.resize(list_slots_of_host(kRouting, 1, ids_TK.data(), nullptr, 5, slots.data()));
  EXPECT_EQ(slots, (std::vector<std::int32_t>{0, 1, 2, 4, 5, 13}));

  std::vector<std::int32_t> kept = {0, 6, 6, -1, 7, -1, 3, 1, 2};
  keep_slots_of_host(kRouting, 1, kept);
  EXPECT_EQ(kept, (std::vector<std::int32_t>{-1, 6, 6, -1, 7, -1, -1, -1, -1}));
}

TEST(Crossing, TokensComeByTheFirstGroupThatNeedsThem) {
  HostRouting routing = kRouting;
  routing.num_groups = 2;  // experts 4 and 6 of host 1 in group 0, 5 and 7 in group 1
  const std::vector<std::int32_t> ids_TK = {
      5, 7,  0,   // group 1
      7, 6,  4,   // both: first in group 0
      1, 2,  -1,  // not there
      4, -1, 6,   // group 0
  };
  std::vector<std::int32_t> counts_SG(4, -1);
  count_crossing_tokens(routing, ids_TK, counts_SG.data());
  EXPECT_EQ(counts_SG, (std::vector<std::int32_t>{2, 0, 2, 1}));
  std::vector<std::int32_t> tokens(4);
  tokens.resize(list_crossing_tokens(routing, 1, ids_TK, tokens.data()));
  EXPECT_EQ(tokens, (std::vector<std::int32_t>{1, 3, 0}));
  std::vector<std::int32_t> slots(12);
  slots.resize(list_slots_of_host(routing, 1, ids_TK.data(), tokens.data(), 3, slots.data()));
  EXPECT_EQ(slots, (std::vector<std::int32_t>{4, 5, 9, 11, 3, 0, 1}));
  const std::vector<std::int32_t> counts_E = {1, 1, 1, 0, 2, 1, 2, 2};
  EXPECT_EQ(slots_of_group(routing, 1, 0, counts_E.data()), 4);
  EXPECT_EQ(slots_of_group(routing, 1, 1, counts_E.data()), 3);
}

TEST(Crossing, GroupsCoverARanksExperts) {
  for (const std::int32_t experts : {1, 2, 3, 5, 8, 13}) {
    for (std::int32_t groups = 1; groups <= experts; ++groups) {
      const HostRouting routing{{2, 2 * experts, 1}, 1, groups};
      for (std::int32_t expert = 0; expert < 2 * experts; ++expert) {
        const std::int32_t group = routing.group_of_expert(expert);
        EXPECT_GE(expert % experts, routing.group_begin(group));
        EXPECT_LT(expert % experts, routing.group_begin(group + 1));
      }
      EXPECT_EQ(routing.group_begin(groups), experts);
    }
  }
}

TEST(Crossing, IdsThatAreNoExpertsNeedNoHost) {
  const std::vector<std::int32_t> ids_TK = {8, -2, -1};
  std::vector<std::int32_t> counts_S(2, -1);
  count_crossing_tokens(kRouting, ids_TK, counts_S.data());
  EXPECT_EQ(counts_S, (std::vector<std::int32_t>{0, 0}));
}

}  // namespace
}  // namespace megamoe
