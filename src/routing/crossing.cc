#include "routing/crossing.h"

#include <algorithm>

namespace megamoe {
namespace {

constexpr std::int32_t kNotNeeded = -1;

bool is_on_host(const HostRouting& routing, std::int32_t host, std::int32_t expert) {
  return expert >= 0 && expert < routing.dims.num_experts && routing.host_of_expert(expert) == host;
}

/// The first group on `host` that needs the token; kNotNeeded where none does.
std::int32_t first_group(const HostRouting& routing, std::int32_t host, const std::int32_t* ids_K) {
  std::int32_t first = kNotNeeded;
  for (std::int32_t slot = 0; slot < routing.dims.top_k; ++slot) {
    if (!is_on_host(routing, host, ids_K[slot])) continue;
    const std::int32_t group = routing.group_of_expert(ids_K[slot]);
    if (first == kNotNeeded || group < first) first = group;
  }
  return first;
}

std::int64_t num_tokens_of(const HostRouting& routing, std::span<const std::int32_t> ids_TK) {
  return static_cast<std::int64_t>(ids_TK.size()) / routing.dims.top_k;
}

}  // namespace

void count_crossing_tokens(const HostRouting& routing, std::span<const std::int32_t> ids_TK,
                           std::int32_t* counts_SG) {
  const std::int64_t num_tokens = num_tokens_of(routing, ids_TK);
  std::fill(counts_SG, counts_SG + routing.num_hosts() * routing.num_groups, 0);
  for (std::int32_t host = 0; host < routing.num_hosts(); ++host) {
    for (std::int64_t token = 0; token < num_tokens; ++token) {
      const std::int32_t group =
          first_group(routing, host, ids_TK.data() + token * routing.dims.top_k);
      if (group != kNotNeeded) ++counts_SG[host * routing.num_groups + group];
    }
  }
}

std::int32_t list_crossing_tokens(const HostRouting& routing, std::int32_t host,
                                  std::span<const std::int32_t> ids_TK, std::int32_t* tokens) {
  const std::int64_t num_tokens = num_tokens_of(routing, ids_TK);
  std::int32_t count = 0;
  for (std::int32_t group = 0; group < routing.num_groups; ++group) {
    for (std::int64_t token = 0; token < num_tokens; ++token) {
      const std::int32_t* ids_K = ids_TK.data() + token * routing.dims.top_k;
      if (first_group(routing, host, ids_K) == group) {
        tokens[count++] = static_cast<std::int32_t>(token);
      }
    }
  }
  return count;
}

std::int32_t list_slots_of_host(const HostRouting& routing, std::int32_t host,
                                const std::int32_t* ids_TK, const std::int32_t* tokens,
                                std::int32_t num_tokens, std::int32_t* slots) {
  const std::int32_t top_k = routing.dims.top_k;
  std::int32_t count = 0;
  for (std::int32_t group = 0; group < routing.num_groups; ++group) {
    for (std::int32_t i = 0; i < num_tokens; ++i) {
      const std::int32_t token = tokens == nullptr ? i : tokens[i];
      for (std::int32_t slot = token * top_k; slot < (token + 1) * top_k; ++slot) {
        const bool is_here = is_on_host(routing, host, ids_TK[slot]) &&
                             routing.group_of_expert(ids_TK[slot]) == group;
        if (is_here) slots[count++] = slot;
      }
    }
  }
  return count;
}

std::int64_t slots_of_group(const HostRouting& routing, std::int32_t host, std::int32_t group,
                            const std::int32_t* counts_E) {
  std::int64_t count = 0;
  for (std::int32_t local = 0; local < routing.ranks_per_host; ++local) {
    const std::int32_t first = routing.dims.first_expert_of(host * routing.ranks_per_host + local);
    for (std::int32_t i = routing.group_begin(group); i < routing.group_begin(group + 1); ++i) {
      count += counts_E[first + i];
    }
  }
  return count;
}

void keep_slots_of_host(const HostRouting& routing, std::int32_t host,
                        std::span<std::int32_t> ids_TK) {
  for (std::int32_t& expert : ids_TK) {
    if (expert >= 0 && routing.host_of_expert(expert) != host) expert = -1;
  }
}

}  // namespace megamoe
