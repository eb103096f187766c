#include "routing/crossing.h"

#include <algorithm>

namespace megamoe {
namespace {

bool needs_host(const HostRouting& routing, std::int32_t host, const std::int32_t* ids_K) {
  return std::any_of(ids_K, ids_K + routing.dims.top_k, [&](std::int32_t expert) {
    return expert >= 0 && expert < routing.dims.num_experts &&
           routing.host_of_expert(expert) == host;
  });
}

std::int64_t num_tokens_of(const HostRouting& routing, std::span<const std::int32_t> ids_TK) {
  return static_cast<std::int64_t>(ids_TK.size()) / routing.dims.top_k;
}

}  // namespace

void count_crossing_tokens(const HostRouting& routing, std::span<const std::int32_t> ids_TK,
                           std::int32_t* counts_S) {
  const std::int64_t num_tokens = num_tokens_of(routing, ids_TK);
  for (std::int32_t host = 0; host < routing.num_hosts(); ++host) {
    counts_S[host] = 0;
    for (std::int64_t token = 0; token < num_tokens; ++token) {
      counts_S[host] += needs_host(routing, host, ids_TK.data() + token * routing.dims.top_k);
    }
  }
}

std::int32_t list_crossing_tokens(const HostRouting& routing, std::int32_t host,
                                  std::span<const std::int32_t> ids_TK, std::int32_t* tokens) {
  const std::int64_t num_tokens = num_tokens_of(routing, ids_TK);
  std::int32_t count = 0;
  for (std::int64_t token = 0; token < num_tokens; ++token) {
    if (needs_host(routing, host, ids_TK.data() + token * routing.dims.top_k)) {
      tokens[count++] = static_cast<std::int32_t>(token);
    }
  }
  return count;
}

std::int32_t list_slots_of_host(const HostRouting& routing, std::int32_t host,
                                std::span<const std::int32_t> ids_TK, std::int32_t* slots) {
  std::int32_t count = 0;
  for (std::size_t slot = 0; slot < ids_TK.size(); ++slot) {
    const std::int32_t expert = ids_TK[slot];
    if (expert >= 0 && routing.host_of_expert(expert) == host) {
      slots[count++] = static_cast<std::int32_t>(slot);
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
