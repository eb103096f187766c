#include "comm/network/network_communicator.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "layer/agreement.h"

namespace megamoe::network {
namespace {

using Kind = MeetingPurpose::Kind;

RowSegment whole(const void* data, std::size_t bytes) {
  // Segments are read or written as a message goes out or comes in.
  auto* base = static_cast<std::byte*>(const_cast<void*>(data));
  return {base, static_cast<std::int64_t>(bytes), 1, nullptr};
}

/// Heaps of the ranks of this host.
class HostHeap final : public SymmetricHeap {
 public:
  HostHeap(std::unique_ptr<SymmetricHeap> heap, const Topology& topology, int rank)
      : heap_(std::move(heap)), peers_R_(topology.num_ranks(), nullptr) {
    for (int local = 0; local < topology.ranks_per_host(); ++local) {
      peers_R_[topology.rank_of(topology.host_of(rank), local)] = heap_->peer(local);
    }
  }
  [[nodiscard]] std::byte* peer(int rank) const override { return peers_R_[rank]; }
  [[nodiscard]] std::size_t bytes() const override { return heap_->bytes(); }

 private:
  std::unique_ptr<SymmetricHeap> heap_;
  std::vector<std::byte*> peers_R_;
};

}  // namespace

NetworkCommunicator::NetworkCommunicator(Topology topology, std::unique_ptr<Mesh> mesh,
                                         std::unique_ptr<Communicator> host_group)
    : topology_(std::move(topology)),
      mesh_(std::move(mesh)),
      host_group_(std::move(host_group)),
      sent_R_(mesh_->size()),
      received_R_(mesh_->size()) {
  outgoing_.reserve(mesh_->size());
  incoming_.reserve(mesh_->size());
}

void NetworkCommunicator::meet(const MeetingPurpose& purpose, std::span<const RowSegment> sent_R,
                               std::span<const RowSegment> received_R, double deadline_s) {
  outgoing_.clear();
  incoming_.clear();
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank()) continue;
    outgoing_.push_back({peer, purpose, sent_R.subspan(peer, 1)});
    incoming_.push_back({peer, purpose, received_R.subspan(peer, 1)});
  }
  mesh_->exchange(outgoing_, incoming_, purpose.what.data(), deadline_s);
  throw_if_purposes_differ(size(), [&](int peer) -> const MeetingPurpose& {
    if (peer == rank()) return purpose;
    return incoming_[peer < rank() ? peer : peer - 1].purpose;
  });
}

void NetworkCommunicator::barrier(const char* what, double deadline_s) {
  std::fill(sent_R_.begin(), sent_R_.end(), RowSegment{});
  meet(meeting_purpose(Kind::barrier, 0, what), sent_R_, sent_R_, deadline_s);
}

void NetworkCommunicator::all_gather(const void* mine, void* all, std::size_t bytes,
                                     const char* what, double deadline_s) {
  auto* const all_bytes = static_cast<std::byte*>(all);
  std::fill(sent_R_.begin(), sent_R_.end(), whole(mine, bytes));
  for (int peer = 0; peer < size(); ++peer) {
    received_R_[peer] = whole(all_bytes + peer * bytes, bytes);
  }
  meet(meeting_purpose(Kind::all_gather, bytes, what), sent_R_, received_R_, deadline_s);
  if (bytes > 0) std::memcpy(all_bytes + rank() * bytes, mine, bytes);
}

/// Every rank sums its share of the elements and tells everybody: that moves 2 (R - 1) / R values
/// for each element, in place of R - 1.
void NetworkCommunicator::all_reduce_sum(float* values, std::size_t count, const char* what,
                                         double deadline_s) {
  const MeetingPurpose purpose = meeting_purpose(Kind::all_reduce, count * sizeof(float), what);
  const auto begin_of = [&](int peer) { return count * peer / size(); };
  const auto share_of = [&](int peer) {
    return whole(values + begin_of(peer), (begin_of(peer + 1) - begin_of(peer)) * sizeof(float));
  };
  const std::size_t begin = begin_of(rank());
  const std::size_t share = begin_of(rank() + 1) - begin;
  shares_.resize(std::max(shares_.size(), share * size()));
  for (int peer = 0; peer < size(); ++peer) {
    sent_R_[peer] = share_of(peer);
    received_R_[peer] = whole(shares_.data() + peer * share, share * sizeof(float));
  }
  meet(purpose, sent_R_, received_R_, deadline_s);
  std::copy_n(values + begin, share, shares_.data() + rank() * share);
  for (std::size_t i = 0; i < share; ++i) {
    float sum = shares_[i];
    for (int peer = 1; peer < size(); ++peer) sum += shares_[peer * share + i];
    values[begin + i] = sum;
  }
  for (int peer = 0; peer < size(); ++peer) {
    sent_R_[peer] = share_of(rank());
    received_R_[peer] = share_of(peer);
  }
  meet(purpose, sent_R_, received_R_, deadline_s);
}

std::unique_ptr<SymmetricHeap> NetworkCommunicator::allocate_symmetric(std::size_t bytes,
                                                                       double deadline_s) {
  constexpr const char* kWhat = "the allocation of a symmetric heap";
  std::fill(sent_R_.begin(), sent_R_.end(), RowSegment{});
  meet(meeting_purpose(Kind::allocation, bytes, kWhat), sent_R_, sent_R_, deadline_s);
  std::unique_ptr<SymmetricHeap> heap;
  const LocalOutcome mine = outcome_of([&] {
    heap = std::make_unique<HostHeap>(host_group_->allocate_symmetric(bytes, deadline_s), topology_,
                                      rank());
  });
  std::vector<LocalOutcome> outcomes(size());
  all_gather(&mine, outcomes.data(), sizeof mine, kWhat, deadline_s);
  for (int peer = 0; peer < size(); ++peer) {
    if (outcomes[peer].failed == 0) continue;
    const int host = topology_.host_of(peer);
    throw Error(outcomes[peer].code,
                "on " + topology_.host_name(host) + ", where rank " +
                    std::to_string(topology_.rank_of(host, 0)) +
                    " is the first and called 0: " + outcomes[peer].message.data());
  }
  return heap;
}

void NetworkCommunicator::transfer(std::span<const Message> sends,
                                   std::span<const Message> receives, const char* what,
                                   double deadline_s) {
  const auto purpose_of = [&](const Message& message) {
    return meeting_purpose(Kind::transfer, total_bytes(message.segments), what);
  };
  outgoing_.clear();
  incoming_.clear();
  for (const Message& message : sends) {
    outgoing_.push_back({message.peer, purpose_of(message), message.segments});
  }
  for (const Message& message : receives) {
    incoming_.push_back({message.peer, purpose_of(message), message.segments});
  }
  mesh_->exchange(outgoing_, incoming_, what, deadline_s);
  for (std::size_t i = 0; i < receives.size(); ++i) {
    const MeetingPurpose expected = purpose_of(receives[i]);
    if (incoming_[i].purpose == expected) continue;
    throw Error(ErrorCode::config_mismatch,
                "ranks make different calls: rank " + std::to_string(rank()) + " is at " +
                    to_string(expected) + ", rank " + std::to_string(receives[i].peer) + " at " +
                    to_string(incoming_[i].purpose));
  }
}

void NetworkCommunicator::abort(const std::string& reason) noexcept {
  mesh_->leave(reason);
  host_group_->abort(reason);
}

}  // namespace megamoe::network
