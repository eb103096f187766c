// What a call is to do, worked out on the host: the truth that the agents' accesses are held
// against. Built by the functions that the library itself plans with.
//
// Legend: R ranks, T tokens of a rank (each its own), K slots, E experts, e experts of a rank.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "routing/plan.h"

namespace megamoe::checker {

/// Of which rows a backward call has g and u.
enum class Kept {
  nothing,  ///< gate_up runs again, and pulls x and dy
  some,     ///< p pulls dy and, as split_groups() tells, x; gate_up for the others is left out
  all       ///< p pulls dy, the weight gradients pull x
};

struct CallSpec {
  bool backward = false;
  Kept kept = Kept::nothing;
  std::uint32_t forward_call = 0;              ///< the forward call of a backward call
  std::vector<std::vector<std::int32_t>> ids;  ///< [R][T * K]; a backward call has those of its
                                               ///< forward call
  std::int32_t bad_rank = -1;                  ///< has an id out of range: the call fails
};

struct Pull {
  std::uint32_t source = 0;
  std::uint32_t token = 0;
  std::vector<std::uint32_t> rows;
};

/// The rows of one rank.
struct RankPlan {
  std::vector<std::int32_t> begin_e;
  std::vector<std::int32_t> count_e;
  std::vector<RowOrigin> origin_C;  ///< rank -1: a pad
  std::vector<Pull> pulls;          ///< in the order of schedule/pull_order.h
};

struct CallPlan {
  std::vector<std::uint32_t> num_tokens_R;
  std::vector<RankPlan> rank;
};

CallPlan make_call_plan(const RoutingDims& dims, const CallSpec& call);

/// Ids of every kind: some tokens without slots, some slots twice on an expert, some experts
/// without rows.
std::vector<std::vector<std::int32_t>> random_ids(const RoutingDims& dims,
                                                  const std::vector<std::uint32_t>& num_tokens_R,
                                                  std::mt19937& random);

}  // namespace megamoe::checker
