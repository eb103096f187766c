// What crosses to another host in a call: each token that any expert there needs, once; and the
// slots whose results come back.
//
// Legend: R ranks, T tokens of a rank, K slots, E experts, S hosts, m tokens that cross.
#pragma once

#include <cstdint>
#include <span>

#include "routing/plan.h"

namespace megamoe {

/// Routing of a group whose ranks are on several hosts, equally many on each.
struct HostRouting {
  RoutingDims dims;
  std::int32_t ranks_per_host = 1;

  [[nodiscard]] std::int32_t num_hosts() const { return dims.num_ranks / ranks_per_host; }
  [[nodiscard]] std::int32_t host_of_expert(std::int32_t expert) const {
    return dims.owner_of(expert) / ranks_per_host;
  }
};

/// Writes how many tokens need each host: S numbers. ids_TK is dense; ids that are no experts are
/// skipped.
void count_crossing_tokens(const HostRouting& routing, std::span<const std::int32_t> ids_TK,
                           std::int32_t* counts_S);

/// Writes the tokens that need `host`, in order, and returns how many.
std::int32_t list_crossing_tokens(const HostRouting& routing, std::int32_t host,
                                  std::span<const std::int32_t> ids_TK, std::int32_t* tokens);

/// Writes the slots (token * K + slot) whose experts are on `host`, in order, and returns how many.
std::int32_t list_slots_of_host(const HostRouting& routing, std::int32_t host,
                                std::span<const std::int32_t> ids_TK, std::int32_t* slots);

/// Empties the slots whose experts are on other hosts than `host`.
void keep_slots_of_host(const HostRouting& routing, std::int32_t host,
                        std::span<std::int32_t> ids_TK);

}  // namespace megamoe
