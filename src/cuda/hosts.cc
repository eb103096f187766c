#include "cuda/hosts.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "schedule/network_groups.h"

namespace megamoe::cuda {
namespace {

constexpr std::int64_t kPieceAlignment = 16;

std::int32_t num_groups_of(const LayerConfig& config, const WorkspaceDims& dims, int num_hosts,
                           const HostConnection& connection) {
  if (config.overlap == Overlap::off) return 1;
  const std::int32_t most = std::min(kMaxNetworkGroups, dims.routing.experts_per_rank());
  if (connection.num_groups != 0) return std::min(connection.num_groups, most);
  return schedule::choose_num_groups(
      {.num_hosts = num_hosts,
       .num_tokens = dims.max_tokens,
       .top_k = dims.routing.top_k,
       .experts_per_rank = dims.routing.experts_per_rank(),
       .row_bytes = dims.hidden_dim * static_cast<std::int64_t>(sizeof(bf16)),
       .bytes_per_s = connection.bytes_per_s},
      most);
}

}  // namespace

Hosts::Hosts(const LayerConfig& config, Workspace::Impl& workspace,
             const HostConnection& connection)
    : rows_arrived(kMaxNetworkGroups),
      results_sent(kMaxNetworkGroups),
      config_(config),
      link_(*connection.link),
      dims_(workspace_dims(config, workspace.communicator.size())),
      topology_(workspace.communicator.topology()),
      rank_(workspace.communicator.rank()),
      own_host_(topology_.host_of(rank_)),
      routing_{dims_.routing, topology_.ranks_per_host(),
               num_groups_of(config, dims_, topology_.num_hosts(), connection)},
      layout_(gpu_hosts_layout(dims_, topology_.num_hosts())),
      host_{topology_.rank_of(own_host_, 0), topology_.ranks_per_host(), layout_.group_signals,
            link_.is_over()},
      local_(static_cast<CudaWorkspace&>(*workspace.memory).local.data()),
      entry_(workspace.communicator,
             dims_.routing.num_experts + topology_.num_hosts() * routing_.num_groups),
      of_call_(kNumOfCall) {
  const std::int64_t num_slots = dims_.max_tokens * dims_.routing.top_k;
  for (int host = 0; host < topology_.num_hosts(); ++host) {
    if (host == own_host_) continue;
    const auto place = static_cast<std::int64_t>(peers_.size());
    Peer peer;
    peer.host = host;
    peer.rank = topology_.rank_of(host, topology_.local_index_of(rank_));
    peer.crossing_tokens = layout_.crossing_tokens_DT.in(local_) + place * dims_.max_tokens;
    peer.sent_tokens = layout_.sent_tokens_DT.in(local_) + place * dims_.max_tokens;
    peer.own_slots = layout_.own_slots_DTK.in(local_) + place * num_slots;
    peer.relayed_ids = layout_.relayed_ids_DTK.in(local_) + place * num_slots;
    peer.arrived_tokens = layout_.arrived_tokens_DT.in(local_) + place * dims_.max_tokens;
    peer.relayed_slots = layout_.relayed_slots_DTK.in(local_) + place * num_slots;
    peer.outgoing = layout_.outgoing.in(local_) + place * layout_.buffer_bytes;
    peer.incoming = layout_.incoming.in(local_) + place * layout_.buffer_bytes;
    peers_.push_back(peer);
    peer_ranks_.ranks[peer_ranks_.count++] = peer.rank;
  }
  outgoing_D_.resize(peers_.size());
  incoming_D_.resize(peers_.size());
}

void Hosts::complete(gpu::RankView& view, const SymmetricHeap& heap) const {
  for (const Peer& peer : peers_) {
    const std::int64_t part = 1 + (&peer - peers_.data());
    for (int index = 0; index < topology_.ranks_per_host(); ++index) {
      view.symmetric_R[topology_.rank_of(peer.host, index)] =
          heap.peer(topology_.rank_of(own_host_, index)) + part * layout_.part_stride;
    }
  }
}

void Hosts::use(const gpu::RankView& network_view) {
  view_ = network_view;
  for (Peer& peer : peers_) {
    peer.source = network_view;
    peer.source.rank = peer.rank;
  }
}

void Hosts::list_tokens(std::byte* plan, std::int64_t num_tokens, cudaStream_t stream) {
  HostRouting in_order = routing_;
  in_order.num_groups = 1;
  for (std::size_t i = 0; i < peers_.size(); ++i) {
    const gpu::IdsOfHost ids{view_.plan_layout.ids_TK.in(plan), num_tokens, peers_[i].host};
    gpu::list_tokens(in_order, ids, peers_[i].crossing_tokens, nullptr, stream);
    gpu::list_tokens(routing_, ids, peers_[i].sent_tokens,
                     counts_.get()->crossing_DG + i * routing_.num_groups, stream);
  }
}

void Hosts::publish_counts(std::byte* plan, std::int64_t num_tokens, cudaStream_t stream) {
  gpu::publish_counts(view_, plan, num_tokens, counts_.get(), stream);
  check(cudaEventRecord(of_call_[kCounted], stream), "cudaEventRecord");
}

bool Hosts::counts_are_known() const {
  const cudaError_t status = cudaEventQuery(of_call_[kCounted]);
  if (status == cudaErrorNotReady) return false;
  check(status, "counting the slots of a call");
  return true;
}

void Hosts::take_counts() {
  const gpu::CallCounts& counts = *counts_.get();
  if (counts.first_bad_slot >= 0) {
    IdFault fault;
    fault.token = counts.first_bad_slot / dims_.routing.top_k;
    fault.slot = static_cast<std::int32_t>(counts.first_bad_slot % dims_.routing.top_k);
    fault.value = counts.bad_id;
    throw_if_found(fault, dims_.routing);
  }
  const std::span<std::int32_t> mine = entry_.counts();
  std::copy_n(counts.counts_E, dims_.routing.num_experts, mine.begin());
  for (std::size_t i = 0; i < peers_.size(); ++i) {
    std::copy_n(counts.crossing_DG + i * routing_.num_groups, routing_.num_groups,
                mine.begin() + dims_.routing.num_experts + peers_[i].host * routing_.num_groups);
  }
}

void Hosts::read_counts(CudaCallState& state) {
  const std::size_t num_experts = dims_.routing.num_experts;
  const std::size_t num_crossing = topology_.num_hosts() * routing_.num_groups;
  state.counts_RE.resize(num_experts * topology_.num_ranks());
  state.crossing_RSG.resize(num_crossing * topology_.num_ranks());
  for (int rank = 0; rank < topology_.num_ranks(); ++rank) {
    entry_.read_counts(rank, 0,
                       std::span(state.counts_RE).subspan(rank * num_experts, num_experts));
    entry_.read_counts(rank, num_experts,
                       std::span(state.crossing_RSG).subspan(rank * num_crossing, num_crossing));
  }
  check_row_capacity(dims_, state.counts_RE.data());
}

std::int64_t Hosts::slots_of(int rank, int host, std::int32_t group) const {
  return slots_of_group(
      routing_, host, group,
      state_->counts_RE.data() + static_cast<std::int64_t>(rank) * dims_.routing.num_experts);
}

void Hosts::begin(const CudaCallState& state, CallOrder& order) {
  state_ = &state;
  order_ = &order;
  const auto crossing = [&](int rank, int host, std::int32_t group) {
    const std::int64_t of_rank = static_cast<std::int64_t>(rank) * topology_.num_hosts();
    return state.crossing_RSG[(of_rank + host) * routing_.num_groups + group];
  };
  for (Peer& peer : peers_) {
    for (std::int32_t group = 0; group < routing_.num_groups; ++group) {
      peer.sent[group + 1] = peer.sent[group] + crossing(rank_, peer.host, group);
      peer.arrived[group + 1] = peer.arrived[group] + crossing(peer.rank, own_host_, group);
      peer.own[group + 1] = peer.own[group] + slots_of(rank_, peer.host, group);
      peer.relayed[group + 1] = peer.relayed[group] + slots_of(peer.rank, own_host_, group);
    }
  }
}

const std::int32_t* Hosts::pinned_counts_RE() {
  std::copy(state_->counts_RE.begin(), state_->counts_RE.end(), all_counts_.get()->counts_RE);
  return all_counts_.get()->counts_RE;
}

Hosts::Rows Hosts::rows(const void* base, const std::int32_t* numbers, std::int64_t row_bytes,
                        std::int64_t num_rows) {
  // What is sent is only read.
  return {static_cast<std::byte*>(const_cast<void*>(base)), numbers, row_bytes, num_rows};
}

void Hosts::exchange_routing(gpu::CallKind kind, std::byte* plan, cudaStream_t stream) {
  const std::int64_t top_k = dims_.routing.top_k;
  const auto id_bytes = top_k * static_cast<std::int64_t>(sizeof(std::int32_t));
  const auto weight_bytes = top_k * static_cast<std::int64_t>(sizeof(float));
  const auto groups = static_cast<std::size_t>(routing_.num_groups);
  for (std::size_t i = 0; i < peers_.size(); ++i) {
    const Peer& peer = peers_[i];
    outgoing_D_[i].push_back(
        rows(view_.plan_layout.ids_TK.in(plan), peer.crossing_tokens, id_bytes, peer.sent[groups]));
    incoming_D_[i].push_back(rows(peer.relayed_ids, nullptr, id_bytes, peer.arrived[groups]));
    if (kind == gpu::CallKind::forward) continue;
    outgoing_D_[i].push_back(rows(view_.plan_layout.weights_TK.in(plan), peer.crossing_tokens,
                                  weight_bytes, peer.sent[groups]));
    incoming_D_[i].push_back(
        rows(view_.symmetric.exchange.staged_weights_TK.in(view_.symmetric_R[peer.rank]), nullptr,
             weight_bytes, peer.arrived[groups]));
  }
  transfer("the routing of tokens", stream);
  for (const Peer& peer : peers_) {
    const std::int64_t num_tokens = peer.arrived[groups];
    gpu::keep_ids_of_host(routing_, own_host_, peer.relayed_ids, num_tokens * top_k, stream);
    gpu::list_tokens(routing_, {peer.relayed_ids, num_tokens, own_host_}, peer.arrived_tokens,
                     nullptr, stream);
    gpu::publish_for_source(peer.source, plan, peer.relayed_ids, num_tokens, stream);
  }
}

void Hosts::exchange_rows(gpu::CallKind kind, std::int32_t group, cudaStream_t stream) {
  const SymmetricLayout& exchange = view_.symmetric.exchange;
  const std::int64_t row_bytes = dims_.hidden_dim * static_cast<std::int64_t>(sizeof(bf16));
  for (std::size_t i = 0; i < peers_.size(); ++i) {
    const Peer& peer = peers_[i];
    std::byte* own = view_.symmetric_R[rank_];
    std::byte* relayed = view_.symmetric_R[peer.rank];
    const auto add = [&](const Region<bf16>& staged) {
      outgoing_D_[i].push_back(rows(staged.in(own), peer.sent_tokens + peer.sent[group], row_bytes,
                                    peer.sent[group + 1] - peer.sent[group]));
      incoming_D_[i].push_back(rows(staged.in(relayed), peer.arrived_tokens + peer.arrived[group],
                                    row_bytes, peer.arrived[group + 1] - peer.arrived[group]));
    };
    add(exchange.staged_rows_TH);
    if (kind == gpu::CallKind::backward) add(exchange.staged_dy_TH);
  }
  transfer("tokens", stream);
}

void Hosts::list_slots(std::byte* plan, cudaStream_t stream) {
  const auto groups = static_cast<std::size_t>(routing_.num_groups);
  for (const Peer& peer : peers_) {
    gpu::list_slots(routing_, {view_.plan_layout.ids_TK.in(plan), state_->num_tokens, peer.host},
                    peer.own_slots, stream);
    gpu::list_slots(routing_, {peer.relayed_ids, peer.arrived[groups], own_host_},
                    peer.relayed_slots, stream);
  }
}

/// With them each rank says whether its call has failed: what comes from a rank where it has is no
/// result.
void Hosts::return_results(gpu::CallKind kind, std::int32_t group, cudaStream_t stream) {
  const SymmetricLayout& exchange = view_.symmetric.exchange;
  const std::int64_t row_bytes = dims_.hidden_dim * static_cast<std::int64_t>(sizeof(bf16));
  std::int32_t* failed_D = layout_.peer_failed_D.in(local_);
  for (std::size_t i = 0; i < peers_.size(); ++i) {
    const Peer& peer = peers_[i];
    std::byte* own = view_.symmetric_R[rank_];
    std::byte* relayed = view_.symmetric_R[peer.rank];
    outgoing_D_[i].push_back(rows(&view_.control()->call_failed, nullptr, sizeof(std::int32_t), 1));
    incoming_D_[i].push_back(rows(failed_D + i, nullptr, sizeof(std::int32_t), 1));
    const auto add = [&](std::byte* from, std::byte* to, std::int64_t bytes) {
      outgoing_D_[i].push_back(rows(from, peer.relayed_slots + peer.relayed[group], bytes,
                                    peer.relayed[group + 1] - peer.relayed[group]));
      incoming_D_[i].push_back(
          rows(to, peer.own_slots + peer.own[group], bytes, peer.own[group + 1] - peer.own[group]));
    };
    add(reinterpret_cast<std::byte*>(exchange.slot_rows_TKH.in(relayed)),
        reinterpret_cast<std::byte*>(exchange.slot_rows_TKH.in(own)), row_bytes);
    if (kind == gpu::CallKind::forward) continue;
    add(reinterpret_cast<std::byte*>(exchange.slot_dweights_TK.in(relayed)),
        reinterpret_cast<std::byte*>(exchange.slot_dweights_TK.in(own)), sizeof(float));
  }
  transfer("results", stream);
  gpu::judge_peers(view_, host_, peer_ranks_, failed_D, stream);
}

std::vector<Hosts::Piece> Hosts::next_pieces(const Cargo& cargo, Cursor& cursor) const {
  std::vector<Piece> pieces;
  std::int64_t offset = 0;
  for (; cursor.rows_idx < cargo.size(); ++cursor.rows_idx, cursor.first_row = 0) {
    Rows part = cargo[cursor.rows_idx];
    const std::int64_t left = part.num_rows - cursor.first_row;
    if (left == 0) continue;
    const std::int64_t room = (layout_.buffer_bytes - offset) / part.row_bytes;
    part.num_rows = std::min(left, room);
    if (part.num_rows == 0) break;
    if (part.rows != nullptr) {
      part.rows += cursor.first_row;
    } else {
      part.base += cursor.first_row * part.row_bytes;
    }
    pieces.push_back({part, offset});
    offset = std::min(round_up(offset + part.num_rows * part.row_bytes, kPieceAlignment),
                      layout_.buffer_bytes);
    cursor.first_row += part.num_rows;
    if (part.num_rows < left) break;
  }
  return pieces;
}

void Hosts::transfer(const char* what, cudaStream_t stream) {
  order_->in_turn(topology_.local_index_of(rank_), topology_.ranks_per_host(),
                  [&] { enqueue_transfer(what, stream); });
}

void Hosts::enqueue_transfer(const char* what, cudaStream_t stream) {
  const auto bytes_of = [](const std::vector<Piece>& pieces) {
    const Piece& last = pieces.back();
    return last.offset + last.rows.num_rows * last.rows.row_bytes;
  };
  std::vector<Cursor> sent_D(peers_.size());
  std::vector<Cursor> received_D(peers_.size());
  std::vector<HostMessage> sends;
  std::vector<HostMessage> receives;
  std::vector<std::vector<Piece>> arriving_D(peers_.size());
  for (;;) {
    sends.clear();
    receives.clear();
    for (std::size_t i = 0; i < peers_.size(); ++i) {
      const Peer& peer = peers_[i];
      const std::vector<Piece> pieces = next_pieces(outgoing_D_[i], sent_D[i]);
      for (const auto& [part, offset] : pieces) {
        gpu::copy_rows(
            {part.base, part.rows, peer.outgoing + offset, nullptr, part.row_bytes, part.num_rows},
            stream);
      }
      if (!pieces.empty()) sends.push_back({peer.host, peer.outgoing, bytes_of(pieces)});
      arriving_D[i] = next_pieces(incoming_D_[i], received_D[i]);
      if (!arriving_D[i].empty()) {
        receives.push_back({peer.host, peer.incoming, bytes_of(arriving_D[i])});
      }
    }
    if (sends.empty() && receives.empty()) break;
    link_.exchange(sends, receives, what, config_.inner_deadline_s, stream);
    for (std::size_t i = 0; i < peers_.size(); ++i) {
      for (const auto& [part, offset] : arriving_D[i]) {
        gpu::copy_rows({peers_[i].incoming + offset, nullptr, part.base, part.rows, part.row_bytes,
                        part.num_rows},
                       stream);
      }
    }
  }
  for (std::size_t i = 0; i < peers_.size(); ++i) {
    outgoing_D_[i].clear();
    incoming_D_[i].clear();
  }
}

}  // namespace megamoe::cuda
