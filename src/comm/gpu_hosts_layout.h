// The buffer map of the GPU backend on several hosts: what it adds to gpu_workspace_layout.h, on
// host and device. Nothing of it exists on one host.
//
// Legend: S hosts, D = S - 1 other hosts, R ranks, T max tokens of a rank, K slots.
//
// What peers pull from and push to exists S times in a rank's symmetric memory: first its own, as
// on one host, then, for each other host, that of the rank there with the same index, for which
// this rank stands (a relay). All parts look alike, `part_stride` bytes apart: shifted by it, the
// memory of a relay is that of the source.
#pragma once

#include <algorithm>
#include <cstdint>

#include "comm/gpu_workspace_layout.h"

namespace megamoe {

/// Most groups of experts that a call is cut into.
inline constexpr std::int32_t kMaxNetworkGroups = 8;

/// What a rank tells the ranks of its host about a group of experts, once a call each.
enum class GroupSignal : std::int32_t {
  rows_arrived,  ///< tokens from all other hosts that the group needs lie in my memory
  results_sent,  ///< its results lie where they are awaited; it reads no rows of the group any more
};
inline constexpr std::int32_t kNumGroupSignals = 2;

struct GpuHostsLayout {
  std::int64_t part_stride = 0;
  /// [kNumGroupSignals, kMaxNetworkGroups, R], written by rank r. In the place of the counts, which
  /// hosts exchange among themselves: it depends on the number of ranks alone.
  Region<device::SignalValue> group_signals;
  std::int64_t symmetric_bytes = 0;

  // What only the rank itself uses, behind gpu_local_layout().
  Region<std::int32_t> crossing_tokens_DT;  ///< own tokens that another host needs, in order
  Region<std::int32_t> sent_tokens_DT;      ///< the same by group, then in order
  Region<std::int32_t> own_slots_DTK;       ///< whose experts are on another host, by group
  Region<std::int32_t> relayed_ids_DTK;     ///< of the tokens that came from another host
  Region<std::int32_t> arrived_tokens_DT;   ///< their numbers, by group
  Region<std::int32_t> relayed_slots_DTK;   ///< whose results go back to another host, by group
  Region<std::int32_t> peer_failed_D;       ///< what each peer says about its call with its results
  Region<std::byte> outgoing;               ///< D buffers of `buffer_bytes`
  Region<std::byte> incoming;               ///< likewise
  std::int64_t buffer_bytes = 0;
  std::int64_t local_bytes = 0;
};

/// Rows are packed for the network, and unpacked, in pieces of at most this size.
inline constexpr std::int64_t kNetworkPieceBytes = std::int64_t{32} << 20;

/// A row is the most that must be sent at once; more than all results of a rank never are.
inline std::int64_t network_buffer_bytes(const WorkspaceDims& dims) {
  const std::int64_t row_bytes = dims.hidden_dim * static_cast<std::int64_t>(sizeof(bf16));
  const std::int64_t slots = std::max<std::int64_t>(dims.max_tokens * dims.routing.top_k, 1);
  const std::int64_t most = slots * (row_bytes + static_cast<std::int64_t>(sizeof(float)));
  return round_up(std::max(row_bytes, std::min(most, kNetworkPieceBytes)),
                  RegionAllocator::kAlignment);
}

inline GpuHostsLayout gpu_hosts_layout(const WorkspaceDims& dims, int num_hosts) {
  const GpuSymmetricLayout one_host = gpu_symmetric_layout(dims);
  const std::int64_t num_others = num_hosts - 1;
  const std::int64_t tokens = num_others * dims.max_tokens;
  const std::int64_t slots = tokens * dims.routing.top_k;
  GpuHostsLayout layout;
  layout.part_stride = one_host.bytes - one_host.exchange.staged_rows_TH.offset;
  layout.symmetric_bytes = one_host.bytes + num_others * layout.part_stride;
  layout.group_signals = {one_host.counts_2RE.offset,
                          kNumGroupSignals * kMaxNetworkGroups * dims.routing.num_ranks};
  static_assert(kNumGroupSignals * kMaxNetworkGroups * sizeof(device::SignalValue) <=
                2 * kMaxExperts * sizeof(std::int32_t));

  RegionAllocator regions(gpu_local_layout(dims).bytes);
  layout.crossing_tokens_DT = regions.take<std::int32_t>(tokens);
  layout.sent_tokens_DT = regions.take<std::int32_t>(tokens);
  layout.own_slots_DTK = regions.take<std::int32_t>(slots);
  layout.relayed_ids_DTK = regions.take<std::int32_t>(slots);
  layout.arrived_tokens_DT = regions.take<std::int32_t>(tokens);
  layout.relayed_slots_DTK = regions.take<std::int32_t>(slots);
  layout.peer_failed_D = regions.take<std::int32_t>(num_others);
  layout.buffer_bytes = network_buffer_bytes(dims);
  layout.outgoing = regions.take<std::byte>(num_others * layout.buffer_bytes);
  layout.incoming = regions.take<std::byte>(num_others * layout.buffer_bytes);
  layout.local_bytes = regions.bytes();
  return layout;
}

/// What a workspace holds on `num_hosts` hosts.
inline std::int64_t gpu_symmetric_bytes(const WorkspaceDims& dims, int num_hosts) {
  return num_hosts == 1 ? gpu_symmetric_layout(dims).bytes
                        : gpu_hosts_layout(dims, num_hosts).symmetric_bytes;
}
inline std::int64_t gpu_local_bytes(const WorkspaceDims& dims, int num_hosts) {
  return num_hosts == 1 ? gpu_local_layout(dims).bytes
                        : gpu_hosts_layout(dims, num_hosts).local_bytes;
}

}  // namespace megamoe
