// A rank's part of what a call does between hosts: who its peers are, what crosses to them and
// comes back, and its transfers.
//
// A rank exchanges with the rank of its own index on every other host, its peer there, which stands
// for it among the ranks of that host, as it stands for the peer here (a relay).
//
// Legend: S hosts, D = S - 1 other hosts, G groups of experts, R ranks, T tokens, K slots, H
// hidden.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "comm/cuda/host_link.h"
#include "comm/gpu_hosts_layout.h"
#include "cuda/call_order.h"
#include "cuda/call_state.h"
#include "cuda/runtime.h"
#include "cuda/workspace.h"
#include "kernels/hosts/hosts.h"
#include "layer/call_entry.h"
#include "megamoe/config.h"

namespace megamoe::cuda {

/// Events of the current device.
class Events {
 public:
  explicit Events(int count) : events_(count) {}
  [[nodiscard]] cudaEvent_t operator[](int i) const { return events_[i].get(); }

 private:
  std::vector<OwnedEvent> events_;
};

/// `stream` goes on when `other` has done what it holds now.
inline void wait_for_stream(cudaStream_t stream, cudaStream_t other, cudaEvent_t event) {
  check(cudaEventRecord(event, other), "cudaEventRecord");
  check(cudaStreamWaitEvent(stream, event, 0), "cudaStreamWaitEvent");
}

class Hosts {
 public:
  Hosts(const LayerConfig& config, Workspace::Impl& workspace, const HostConnection& connection);

  [[nodiscard]] HostLink& link() const { return link_; }
  [[nodiscard]] std::int32_t num_groups() const { return routing_.num_groups; }
  [[nodiscard]] gpu::ExpertRange experts_of(std::int32_t group) const {
    return {routing_.group_begin(group), routing_.group_begin(group + 1)};
  }
  [[nodiscard]] CallEntry& entry() { return entry_; }
  [[nodiscard]] const gpu::HostView& host_view() const { return host_; }
  /// Adds the memory that relays hold for ranks of other hosts to the view of this host's.
  void complete(gpu::RankView& view, const SymmetricHeap& heap) const;
  /// `view` is complete; `network_view` is used where transfers are enqueued.
  void use(const gpu::RankView& network_view);

  /// Lists this rank's tokens that cross; counted for a forward call.
  void list_tokens(std::byte* plan, std::int64_t num_tokens, cudaStream_t stream);
  /// Behind list_tokens() and the counting of slots: what the host has to know.
  void publish_counts(std::byte* plan, std::int64_t num_tokens, cudaStream_t stream);
  /// True once it is known; then entry().counts() can be filled in. Throws Error for a bad id.
  [[nodiscard]] bool counts_are_known() const;
  void take_counts();
  /// Everybody's counts, after entry().exchange(). Throws Error where a capacity is too small.
  void read_counts(CudaCallState& state);

  /// From here on state and order are of an agreed call, of which everybody's counts are known.
  void begin(const CudaCallState& state, CallOrder& order);
  /// Everybody's counts where the device reads them.
  [[nodiscard]] const std::int32_t* pinned_counts_RE();
  /// Ids, and weights in a backward call, to the peers and from them; then the pull lists of all
  /// for which this rank stands.
  void exchange_routing(gpu::CallKind kind, std::byte* plan, cudaStream_t stream);
  /// Staged rows that `group` needs first.
  void exchange_rows(gpu::CallKind kind, std::int32_t group, cudaStream_t stream);
  /// Slots whose results come back, and go back.
  void list_slots(std::byte* plan, cudaStream_t stream);
  void return_results(gpu::CallKind kind, std::int32_t group, cudaStream_t stream);

  [[nodiscard]] cudaEvent_t staged() const { return of_call_[kStaged]; }
  [[nodiscard]] cudaEvent_t listed() const { return of_call_[kListed]; }

  Events rows_arrived;  ///< by group
  Events results_sent;  ///< by group

 private:
  enum OfCall { kStaged, kListed, kCounted, kNumOfCall };

  /// A host other than this one.
  struct Peer {
    int host = 0;
    int rank = 0;
    gpu::RankView source;  ///< in the name of the peer
    std::int32_t* crossing_tokens = nullptr;
    std::int32_t* sent_tokens = nullptr;
    std::int32_t* own_slots = nullptr;
    std::int32_t* relayed_ids = nullptr;
    std::int32_t* arrived_tokens = nullptr;
    std::int32_t* relayed_slots = nullptr;
    std::byte* outgoing = nullptr;
    std::byte* incoming = nullptr;
    // Of the current call: where each group begins in the lists above, and their ends.
    using Begins = std::array<std::int64_t, kMaxNetworkGroups + 1>;
    Begins sent{};
    Begins arrived{};
    Begins own{};
    Begins relayed{};
  };

  /// Rows of memory that travel: row numbers `rows` of `base`; null: 0, 1, ...
  struct Rows {
    std::byte* base = nullptr;
    const std::int32_t* rows = nullptr;
    std::int64_t row_bytes = 0;
    std::int64_t num_rows = 0;
  };
  /// To or from one peer, one after the other.
  using Cargo = std::vector<Rows>;
  /// Part of one of a cargo's Rows, at an offset in a buffer.
  struct Piece {
    Rows rows;
    std::int64_t offset = 0;
  };
  /// How far a cargo has been cut into pieces.
  struct Cursor {
    std::size_t rows_idx = 0;
    std::int64_t first_row = 0;
  };

  static Rows rows(const void* base, const std::int32_t* numbers, std::int64_t row_bytes,
                   std::int64_t num_rows);
  /// As much as a buffer holds; the same on both ends.
  std::vector<Piece> next_pieces(const Cargo& cargo, Cursor& cursor) const;
  /// Moves outgoing_ and incoming_, which become empty.
  void transfer(const char* what, cudaStream_t stream);
  void enqueue_transfer(const char* what, cudaStream_t stream);
  [[nodiscard]] std::int64_t slots_of(int rank, int host, std::int32_t group) const;

  const LayerConfig& config_;
  HostLink& link_;
  WorkspaceDims dims_;
  Topology topology_;
  int rank_;
  int own_host_;
  HostRouting routing_;
  GpuHostsLayout layout_;
  gpu::HostView host_;
  std::byte* local_;
  gpu::RankView view_;
  gpu::PeersOnHosts peer_ranks_;
  std::vector<Peer> peers_;
  CallEntry entry_;
  Events of_call_;
  PinnedValue<gpu::CallCounts> counts_;
  struct AllCounts {
    std::int32_t counts_RE[kMaxRanks * kMaxExperts];
  };
  PinnedValue<AllCounts> all_counts_;
  const CudaCallState* state_ = nullptr;
  CallOrder* order_ = nullptr;
  std::vector<Cargo> outgoing_D_;
  std::vector<Cargo> incoming_D_;
};

}  // namespace megamoe::cuda
