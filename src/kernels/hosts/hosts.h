// What a call does beside the kernels of one host where its group spans several: the host interface
// of what runs on the device. Everything runs on `stream`, without synchronisation.
//
// Ranks agree about a call on the host (layer/call_entry.h), so nothing here waits for a rank of
// another host. In a rank's view the memory of a rank of another host is the part that the relay on
// this host holds for it (comm/gpu_hosts_layout.h): kernels that pull and push need to know nothing
// of hosts. Kernels that signal do: those of exchange/ and plan/ must not be used.
//
// Legend: S hosts, D = S - 1 other hosts, G groups of experts, R ranks, T tokens, K slots.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "comm/gpu_hosts_layout.h"
#include "kernels/exchange/exchange.h"
#include "kernels/plan/plan.h"
#include "kernels/rank_view.h"
#include "routing/crossing.h"

namespace megamoe::gpu {

/// The ranks of this host, and where they tell each other about groups.
struct HostView {
  std::int32_t first_rank = 0;
  std::int32_t num_ranks = 0;
  Region<device::SignalValue> group_signals;
  const std::uint32_t* link_is_over = nullptr;  ///< pinned host memory: HostLink::is_over()
};

/// Experts of this rank.
struct ExpertRange {
  std::int32_t first = 0;
  std::int32_t end = 0;
};

/// What the host must know of a forward call before it can enqueue the rest of it. Pinned memory.
struct CallCounts {
  std::int64_t first_bad_slot;  ///< index into ids [T, K]; -1: there is none
  std::int32_t bad_id;
  std::int32_t counts_E[kMaxExperts];                       ///< slots of each expert
  std::int32_t crossing_DG[kMaxRanks * kMaxNetworkGroups];  ///< tokens to each other host
};

/// Writes what count_slots() has found, and forgets a bad id.
void publish_counts(const RankView& view, std::byte* plan, std::int64_t num_tokens,
                    CallCounts* counts, cudaStream_t stream);

/// Advances the epoch and lays out rows and this rank's pull lists from everybody's counts: those
/// of a forward call lie in pinned memory and are kept in the plan, for publish_for_source() and
/// the backward call, which takes null. write_pull_lists() follows.
void enter_agreed_call(const RankView& view, std::byte* plan, const std::int32_t* counts_RE,
                       std::int64_t num_tokens, cudaStream_t stream);

/// The pull lists of a rank of another host, as it would have made them, where this rank stands for
/// it: `source` is this rank's view with the other's rank, ids_TK hold what came from it. Nothing
/// else may use the plan's scratch meanwhile.
void publish_for_source(const RankView& source, std::byte* plan, const std::int32_t* ids_TK,
                        std::int64_t num_tokens, cudaStream_t stream);

// Parts of it, of plan/.
void count_relayed_slots(const RankView& source, const std::int32_t* ids_TK,
                         std::int64_t num_tokens, cudaStream_t stream);
void write_relayed_lists(const RankView& source, const std::int32_t* ids_TK,
                         std::int64_t num_tokens, cudaStream_t stream);

/// Ids [num_tokens, K], dense, and what is wanted of them.
struct IdsOfHost {
  const std::int32_t* ids_TK = nullptr;
  std::int64_t num_tokens = 0;
  std::int32_t host = 0;  ///< whose experts count
};

/// Writes the numbers of the tokens that need the host, by the first group there that does, then in
/// order; where counts_G is not null, also how many each group has.
void list_tokens(const HostRouting& routing, const IdsOfHost& ids, std::int32_t* tokens,
                 std::int32_t* counts_G, cudaStream_t stream);
/// Writes the slots (token * K + slot) whose experts are on the host, by group, then in order.
void list_slots(const HostRouting& routing, const IdsOfHost& ids, std::int32_t* slots,
                cudaStream_t stream);

/// Copies rows of `row_bytes`, a multiple of 4: row from_rows[i] of `from` (i itself where it is
/// null) becomes row to_rows[i] of `to`.
struct RowCopy {
  const std::byte* from = nullptr;
  const std::int32_t* from_rows = nullptr;
  std::byte* to = nullptr;
  const std::int32_t* to_rows = nullptr;
  std::int64_t row_bytes = 0;
  std::int64_t num_rows = 0;
};
void copy_rows(const RowCopy& copy, cudaStream_t stream);
/// Empties the slots of num_slots ids whose experts are not on `host`.
void keep_ids_of_host(const HostRouting& routing, std::int32_t host, std::int32_t* ids,
                      std::int64_t num_slots, cudaStream_t stream);

/// As announce() and meet(), with the ranks of this host.
void announce_on_host(const RankView& view, const HostView& host, device::Signal what,
                      cudaStream_t stream);
void meet_on_host(const RankView& view, const HostView& host, std::byte* plan, device::Signal what,
                  cudaStream_t stream);
/// Tells the ranks of this host about a group; where the link between hosts is over, that this
/// rank has failed for good.
void announce_group(const RankView& view, const HostView& host, GroupSignal what,
                    std::int32_t group, cudaStream_t stream);
/// Waits until all ranks of this host have announced it, or fails the call. What comes by network
/// has a deadline of its own on the host, which knows whom it waits for: here it is half as long
/// again. The plan's groups become empty, unless `plan` is null, where the call has failed.
void await_group(const RankView& view, const HostView& host, std::byte* plan, GroupSignal what,
                 std::int32_t group, cudaStream_t stream);
/// Fails the call, for good, where one of the words `failed_D`, each the `call_failed` of one of
/// `peers`, is not 0, or where the link is over.
struct PeersOnHosts {
  std::int32_t count = 0;
  std::int32_t ranks[kMaxRanks] = {};
};
void judge_peers(const RankView& view, const HostView& host, const PeersOnHosts& peers,
                 const std::int32_t* failed_D, cudaStream_t stream);
/// As give_up(), to the ranks of this host.
void give_up_on_host(const RankView& view, const HostView& host, cudaStream_t stream);

/// pull_rows() of the tokens that need one of `experts` first, to all rows that they fill. Their
/// pads become zero.
void pull_rows_of(const RankView& view, std::byte* plan, const ExpertRange& experts,
                  const PulledRows& rows, cudaStream_t stream);
/// push_rows() of the rows of `experts`.
void push_rows_of(const RankView& view, std::byte* plan, const ExpertRange& experts,
                  const bf16* rows_CH, const RowOrigin* origin_C, const DweightSegments& dweights,
                  cudaStream_t stream);

/// Loads the kernels of this file that load_exchange_kernels() does not; call once before the first
/// call of a process.
void load_hosts_kernels();

}  // namespace megamoe::gpu
