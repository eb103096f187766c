// What crosses to another host in a call: each token that any expert there needs, once; and the
// slots whose results come back.
//
// Every rank's experts are cut into G groups of neighbours, the same on all ranks. Tokens cross in
// the order of the first group that needs them there, results come back in the order of groups, so
// that one group can be computed while the next one travels. One group where nothing overlaps.
//
// Legend: R ranks, T tokens of a rank, K slots, E experts, e of a rank, S hosts, m tokens that
// cross.
#pragma once

#include <cstdint>
#include <span>

#include "routing/plan.h"
#include "schedule/expert_groups.h"

namespace megamoe {

/// Routing of a group whose ranks are on several hosts, equally many on each.
struct HostRouting {
  RoutingDims dims;
  std::int32_t ranks_per_host = 1;
  std::int32_t num_groups = 1;  ///< G, at most e

  [[nodiscard]] MEGAMOE_HOST_DEVICE std::int32_t num_hosts() const {
    return dims.num_ranks / ranks_per_host;
  }
  [[nodiscard]] MEGAMOE_HOST_DEVICE std::int32_t host_of_expert(std::int32_t expert) const {
    return dims.owner_of(expert) / ranks_per_host;
  }
  [[nodiscard]] MEGAMOE_HOST_DEVICE schedule::ExpertGroups groups() const {
    return {dims.experts_per_rank(), num_groups};
  }
  /// The first of a rank's experts that belongs to `group`; e for group G.
  [[nodiscard]] MEGAMOE_HOST_DEVICE std::int32_t group_begin(std::int32_t group) const {
    return groups().begin(group);
  }
  [[nodiscard]] MEGAMOE_HOST_DEVICE std::int32_t group_of_expert(std::int32_t expert) const {
    return groups().group_of(expert % dims.experts_per_rank());
  }
};

/// Writes how many tokens need each host, by the first group there that needs them: S * G numbers.
/// ids_TK is dense; ids that are no experts are skipped.
void count_crossing_tokens(const HostRouting& routing, std::span<const std::int32_t> ids_TK,
                           std::int32_t* counts_SG);

/// Writes the tokens that need `host`, by the first group that needs them, then in order, and
/// returns how many.
std::int32_t list_crossing_tokens(const HostRouting& routing, std::int32_t host,
                                  std::span<const std::int32_t> ids_TK, std::int32_t* tokens);

/// Writes the slots (token * K + slot) of these tokens whose experts are on `host`, by group, then
/// in the order of tokens, and returns how many. `tokens` null: 0, 1, ... num_tokens - 1.
std::int32_t list_slots_of_host(const HostRouting& routing, std::int32_t host,
                                const std::int32_t* ids_TK, const std::int32_t* tokens,
                                std::int32_t num_tokens, std::int32_t* slots);

/// Slots of one rank, which has counts_E, whose experts are on `host` and in `group`.
std::int64_t slots_of_group(const HostRouting& routing, std::int32_t host, std::int32_t group,
                            const std::int32_t* counts_E);

/// Empties the slots whose experts are on other hosts than `host`.
void keep_slots_of_host(const HostRouting& routing, std::int32_t host,
                        std::span<std::int32_t> ids_TK);

}  // namespace megamoe
