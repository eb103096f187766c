// The buffer map of a group on several hosts: what it adds to workspace_layout.h.
//
// Legend: S hosts, T max tokens of a rank, K slots.
//
// The symmetric memory of a rank holds S parts, each with symmetric_layout(): that of its own host
// is what it has on one host, the others hold what its peers with the same index sent here from
// their hosts (a relay stands for the source), and the results that it sends back.
#pragma once

#include <cstdint>

#include "comm/workspace_layout.h"

namespace megamoe {

/// Where the part for tokens that came from `source_host` begins.
inline std::int64_t symmetric_part_begin(const WorkspaceDims& dims, int source_host) {
  return source_host * symmetric_layout(dims).bytes;
}

/// What only the rank itself uses, beside local_layout(). All zero bytes on one host.
struct RelayLayout {
  Region<std::int32_t> sent_tokens_ST;     ///< of this rank, to each host
  Region<std::int32_t> own_slots_STK;      ///< of this rank, whose results come from each host
  Region<std::int32_t> relayed_ids_STK;    ///< of tokens from each host
  Region<std::int32_t> relayed_slots_STK;  ///< whose results go back to each host
  std::int64_t bytes = 0;
};

inline RelayLayout relay_layout(const WorkspaceDims& dims, int num_hosts, std::int64_t begin = 0) {
  const std::int64_t tokens = num_hosts > 1 ? num_hosts * dims.max_tokens : 0;
  const std::int64_t slots = tokens * dims.routing.top_k;
  RegionAllocator regions(begin);
  RelayLayout layout;
  layout.sent_tokens_ST = regions.take<std::int32_t>(tokens);
  layout.own_slots_STK = regions.take<std::int32_t>(slots);
  layout.relayed_ids_STK = regions.take<std::int32_t>(slots);
  layout.relayed_slots_STK = regions.take<std::int32_t>(slots);
  layout.bytes = regions.bytes();
  return layout;
}

}  // namespace megamoe
