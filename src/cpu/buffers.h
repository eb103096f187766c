// The workspace as the CPU backend sees it: typed pointers into this rank's memory and its peers'.
//
// Legend: T tokens, K slots, H hidden, I intermediate, C rows of this rank (capacity), R ranks.
#pragma once

#include <vector>

#include "comm/relay_layout.h"
#include "comm/workspace_layout.h"
#include "megamoe/communicator.h"

namespace megamoe::cpu {

/// The memory of one rank that its peers reach too.
struct SymmetricBuffers {
  bf16* staged_rows_TH;
  bf16* staged_dy_TH;
  float* staged_weights_TK;
  PullLists pull_lists;
  bf16* slot_rows_TKH;
  float* slot_dweights_TK;
};

struct Buffers {
  /// Where rank r's tokens are fetched and their results awaited: at r itself, or, for a rank of
  /// another host, at its relay, the rank with its index on this host.
  std::vector<SymmetricBuffers> symmetric_R;
  int rank = 0;

  bf16* x_CH;
  bf16* dy_CH;
  bf16* a_CI;
  bf16* dg_CI;
  bf16* du_CI;
  RowOrigin* origin_C;
  float* weight_C;
  float* dweight_segments;

  [[nodiscard]] const SymmetricBuffers& mine() const { return symmetric_R[rank]; }
};

inline Buffers make_buffers(const WorkspaceDims& dims, const Topology& topology,
                            const SymmetricHeap& heap, std::byte* local, int rank) {
  Buffers buffers;
  buffers.rank = rank;
  const int own_host = topology.host_of(rank);
  const SymmetricLayout symmetric = symmetric_layout(dims);
  for (int peer = 0; peer < dims.routing.num_ranks; ++peer) {
    const int relay = topology.rank_of(own_host, topology.local_index_of(peer));
    std::byte* base = heap.peer(relay) + symmetric_part_begin(dims, topology.host_of(peer));
    buffers.symmetric_R.push_back({symmetric.staged_rows_TH.in(base),
                                   symmetric.staged_dy_TH.in(base),
                                   symmetric.staged_weights_TK.in(base),
                                   {symmetric.destination_begin.in(base),
                                    symmetric.pull_tokens.in(base), symmetric.pull_slots.in(base)},
                                   symmetric.slot_rows_TKH.in(base),
                                   symmetric.slot_dweights_TK.in(base)});
  }
  const LocalLayout layout = local_layout(dims);
  buffers.x_CH = layout.x_CH.in(local);
  buffers.dy_CH = layout.dy_CH.in(local);
  buffers.a_CI = layout.a_CI.in(local);
  buffers.dg_CI = layout.dg_CI.in(local);
  buffers.du_CI = layout.du_CI.in(local);
  buffers.origin_C = layout.origin_C.in(local);
  buffers.weight_C = layout.weight_C.in(local);
  buffers.dweight_segments = layout.dweight_segments.in(local);
  return buffers;
}

}  // namespace megamoe::cpu
