#include "cpu/relay.h"

#include "comm/relay_layout.h"

namespace megamoe::cpu {
namespace {

template <class T>
RowSegment rows(const T* base, std::int64_t width, std::int64_t num_rows,
                const std::int32_t* row_numbers = nullptr) {
  // What is sent is only read.
  auto* bytes = reinterpret_cast<std::byte*>(const_cast<T*>(base));
  return {bytes, width * static_cast<std::int64_t>(sizeof(T)), num_rows, row_numbers};
}

/// Tokens that cross from `rank` to `host`.
std::int32_t num_crossing(const CpuCallState& state, int num_hosts, int rank, int host) {
  return state.crossing_RS[static_cast<std::size_t>(rank) * num_hosts + host];
}

}  // namespace

Relay::Relay(const WorkspaceDims& dims, Communicator& group, std::byte* local)
    : topology_(group.topology()),
      rank_(group.rank()),
      network_(group.network()),
      routing_{dims.routing, topology_.ranks_per_host()} {
  const RelayLayout layout = relay_layout(dims, num_hosts(), local_layout(dims).bytes);
  const std::int64_t num_slots = dims.max_tokens * dims.routing.top_k;
  for (int host = 0; host < num_hosts(); ++host) {
    if (host == topology_.host_of(rank_)) continue;
    Peer peer;
    peer.host = host;
    peer.rank = topology_.rank_of(host, topology_.local_index_of(rank_));
    peer.sent_tokens_T = layout.sent_tokens_ST.in(local) + host * dims.max_tokens;
    peer.own_slots_TK = layout.own_slots_STK.in(local) + host * num_slots;
    peer.relayed_ids_TK = layout.relayed_ids_STK.in(local) + host * num_slots;
    peer.relayed_slots_TK = layout.relayed_slots_STK.in(local) + host * num_slots;
    peers_.push_back(std::move(peer));
  }
}

void Relay::count_tokens(std::span<const std::int32_t> ids_TK, std::int32_t* counts_S) const {
  count_crossing_tokens(routing_, ids_TK, counts_S);
}

/// Of this rank's own tokens: those that cross, and the slots whose results come back.
void Relay::list_tokens(const CpuCallState& state) {
  const std::span<const std::int32_t> ids_TK(state.ids_TK.data(),
                                             state.num_tokens * routing_.dims.top_k);
  for (Peer& peer : peers_) {
    const std::int32_t num_sent =
        list_crossing_tokens(routing_, peer.host, ids_TK, peer.sent_tokens_T);
    peer.num_own_slots = list_slots_of_host(routing_, peer.host, ids_TK.data(), peer.sent_tokens_T,
                                            num_sent, peer.own_slots_TK);
  }
}

/// Ids and x rows, to the peer and from it.
void Relay::add_tokens(Peer& peer, const StageContext& stage, const CpuCallState& state) {
  const std::int64_t top_k = routing_.dims.top_k;
  const std::int64_t hidden = stage.dims.hidden_dim;
  const std::int64_t num_sent = num_crossing(state, num_hosts(), rank_, peer.host);
  const std::int64_t num_received =
      num_crossing(state, num_hosts(), peer.rank, topology_.host_of(rank_));
  peer.sent = {rows(state.ids_TK.data(), top_k, num_sent, peer.sent_tokens_T),
               rows(stage.buffers.mine().staged_rows_TH, hidden, num_sent, peer.sent_tokens_T)};
  peer.received = {rows(peer.relayed_ids_TK, top_k, num_received),
                   rows(stage.buffers.symmetric_R[peer.rank].staged_rows_TH, hidden, num_received)};
}

void Relay::transfer(const char* what, double deadline_s) {
  sends_.clear();
  receives_.clear();
  for (const Peer& peer : peers_) {
    sends_.push_back({peer.rank, peer.sent});
    receives_.push_back({peer.rank, peer.received});
  }
  network_->transfer(sends_, receives_, what, deadline_s);
}

/// From the ids that came: pull lists for the ranks of this host, as the sources would have made
/// them, because their rows follow from everybody's counts and the order of the tokens.
void Relay::publish(const StageContext& stage, const CpuCallState& state, PlanScratch& scratch) {
  const int own_host = topology_.host_of(rank_);
  for (Peer& peer : peers_) {
    const std::int64_t num_tokens = num_crossing(state, num_hosts(), peer.rank, own_host);
    const std::span<std::int32_t> ids_TK(peer.relayed_ids_TK, num_tokens * routing_.dims.top_k);
    keep_slots_of_host(routing_, own_host, ids_TK);
    peer.num_relayed_slots =
        list_slots_of_host(routing_, own_host, ids_TK.data(), nullptr,
                           static_cast<std::int32_t>(num_tokens), peer.relayed_slots_TK);
    build_pull_lists(routing_.dims, state.counts_RE.data(), peer.rank, ids_TK, kRowAlignment,
                     scratch, stage.buffers.symmetric_R[peer.rank].pull_lists);
  }
}

void Relay::send_forward(const StageContext& stage, const CpuCallState& state, PlanScratch& scratch,
                         double deadline_s) {
  if (network_ == nullptr) return;
  list_tokens(state);
  for (Peer& peer : peers_) add_tokens(peer, stage, state);
  transfer("tokens from other hosts", deadline_s);
  publish(stage, state, scratch);
}

void Relay::send_backward(const StageContext& stage, const CpuCallState& state,
                          PlanScratch& scratch, double deadline_s) {
  if (network_ == nullptr) return;
  list_tokens(state);
  const std::int64_t top_k = routing_.dims.top_k;
  const std::int64_t hidden = stage.dims.hidden_dim;
  for (Peer& peer : peers_) {
    add_tokens(peer, stage, state);
    const std::int64_t num_sent = peer.sent[0].num_rows;
    const std::int64_t num_received = peer.received[0].num_rows;
    const SymmetricBuffers& relayed = stage.buffers.symmetric_R[peer.rank];
    peer.sent.push_back(
        rows(stage.buffers.mine().staged_dy_TH, hidden, num_sent, peer.sent_tokens_T));
    peer.sent.push_back(rows(state.weights_TK.data(), top_k, num_sent, peer.sent_tokens_T));
    peer.received.push_back(rows(relayed.staged_dy_TH, hidden, num_received));
    peer.received.push_back(rows(relayed.staged_weights_TK, top_k, num_received));
  }
  transfer("gradients from other hosts", deadline_s);
  publish(stage, state, scratch);
}

void Relay::return_forward(const StageContext& stage, double deadline_s) {
  if (network_ == nullptr) return;
  const std::int64_t hidden = stage.dims.hidden_dim;
  for (Peer& peer : peers_) {
    peer.sent = {rows(stage.buffers.symmetric_R[peer.rank].slot_rows_TKH, hidden,
                      peer.num_relayed_slots, peer.relayed_slots_TK)};
    peer.received = {
        rows(stage.buffers.mine().slot_rows_TKH, hidden, peer.num_own_slots, peer.own_slots_TK)};
  }
  transfer("expert outputs from other hosts", deadline_s);
}

void Relay::return_backward(const StageContext& stage, double deadline_s) {
  if (network_ == nullptr) return;
  const std::int64_t hidden = stage.dims.hidden_dim;
  for (Peer& peer : peers_) {
    const SymmetricBuffers& relayed = stage.buffers.symmetric_R[peer.rank];
    const SymmetricBuffers& own = stage.buffers.mine();
    peer.sent = {rows(relayed.slot_rows_TKH, hidden, peer.num_relayed_slots, peer.relayed_slots_TK),
                 rows(relayed.slot_dweights_TK, 1, peer.num_relayed_slots, peer.relayed_slots_TK)};
    peer.received = {rows(own.slot_rows_TKH, hidden, peer.num_own_slots, peer.own_slots_TK),
                     rows(own.slot_dweights_TK, 1, peer.num_own_slots, peer.own_slots_TK)};
  }
  transfer("activation gradients from other hosts", deadline_s);
}

}  // namespace megamoe::cpu
