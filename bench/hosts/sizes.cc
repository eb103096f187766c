#include "sizes.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <span>
#include <thread>
#include <vector>

#include "bench/samples.h"
#include "comm/gpu_hosts_layout.h"
#include "cuda/runtime.h"
#include "kernels/hosts/hosts.h"
#include "layer/call_entry.h"
#include "options.h"
#include "routing/crossing.h"

namespace megamoe::bench {
namespace {

using cuda::check;
using Clock = std::chrono::steady_clock;

double ms_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

/// What travels between this rank and one of another host.
struct Crossing {
  std::int64_t sent_tokens = 0;
  std::int64_t arrived_tokens = 0;
  std::int64_t own_slots = 0;      ///< whose results come back
  std::int64_t relayed_slots = 0;  ///< whose results go back
};

/// Bytes to and from each other host, of one of the transfers of a step.
struct Transfer {
  std::vector<std::int64_t> sent_D;
  std::vector<std::int64_t> received_D;
};

class Steps {
 public:
  Steps(Communicator& group, cuda::HostLink& link, int device, const MoeShape& shape,
        const std::vector<std::vector<std::int32_t>>& ids_RTK)
      : group_(group),
        link_(link),
        shape_(shape),
        topology_(group.topology()),
        routing_{{group.size(), shape.num_experts, shape.top_k}, topology_.ranks_per_host()},
        entry_(group, shape.num_experts + topology_.num_hosts()),
        ids_(device, shape.max_tokens * shape.top_k * 4, "ids"),
        tokens_(device, shape.max_tokens * 4, "tokens"),
        outgoing_(device, (topology_.num_hosts() - 1) * kNetworkPieceBytes, "messages"),
        incoming_(device, (topology_.num_hosts() - 1) * kNetworkPieceBytes, "messages") {
    const std::vector<std::int32_t>& mine = ids_RTK[group.rank()];
    check(cudaMemcpy(ids_.data(), mine.data(), mine.size() * 4, cudaMemcpyHostToDevice), "ids");
    counts_E_.resize(shape.num_experts);
    for (const std::int32_t id : mine) ++counts_E_[id];
    for (int host = 0; host < topology_.num_hosts(); ++host) {
      if (host != topology_.host_of(group.rank())) others_.push_back(host);
    }
  }

  /// Counts on the device, waits for them on the host, and tells all other ranks.
  std::vector<Crossing> agree() {
    for (std::size_t i = 0; i < others_.size(); ++i) list_tokens(i);
    check(cudaEventRecord(counted_.get(), stream_.get()), "counts");
    while (cudaEventQuery(counted_.get()) == cudaErrorNotReady) {
    }
    const std::span<std::int32_t> mine = entry_.counts();
    std::copy(counts_E_.begin(), counts_E_.end(), mine.begin());
    for (std::size_t i = 0; i < others_.size(); ++i) {
      mine[shape_.num_experts + others_[i]] = crossing_.get()->tokens_D[i];
    }
    entry_.exchange({CallKind::forward, 0, 0, -1, {}}, kDeadlineS);
    const int own = topology_.host_of(group_.rank());
    std::vector<Crossing> crossing_D;
    std::vector<std::int32_t> counts_E(shape_.num_experts);
    for (const int host : others_) {
      const int peer = topology_.rank_of(host, topology_.local_index_of(group_.rank()));
      Crossing crossing;
      crossing.sent_tokens = mine[shape_.num_experts + host];
      std::int32_t arrived = 0;
      entry_.read_counts(peer, shape_.num_experts + own, std::span(&arrived, 1));
      crossing.arrived_tokens = arrived;
      crossing.own_slots = slots_of_group(routing_, host, 0, counts_E_.data());
      entry_.read_counts(peer, 0, counts_E);
      crossing.relayed_slots = slots_of_group(routing_, own, 0, counts_E.data());
      crossing_D.push_back(crossing);
    }
    return crossing_D;
  }

  /// The same number of tokens and of slots between any two hosts; the sender still has to know
  /// which tokens it packs.
  std::vector<Crossing> assume(std::int64_t tokens, std::int64_t slots) {
    for (std::size_t i = 0; i < others_.size(); ++i) list_tokens(i);
    return std::vector<Crossing>(others_.size(), Crossing{tokens, tokens, slots, slots});
  }

  /// Enqueues the transfers of a forward and a backward call.
  void travel(const std::vector<Crossing>& crossing_D) {
    for (const Transfer& transfer : transfers_of(crossing_D)) enqueue(transfer);
  }
  void finish() { check(cudaStreamSynchronize(stream_.get()), "a timed step"); }

  [[nodiscard]] std::int64_t bytes_of(const std::vector<Crossing>& crossing_D) const {
    std::int64_t sum = 0;
    for (const Transfer& transfer : transfers_of(crossing_D)) {
      for (const std::int64_t bytes : transfer.sent_D) sum += bytes;
    }
    return sum;
  }

 private:
  void list_tokens(std::size_t other) {
    gpu::list_tokens(
        routing_,
        {reinterpret_cast<const std::int32_t*>(ids_.data()), shape_.max_tokens, others_[other]},
        reinterpret_cast<std::int32_t*>(tokens_.data()), crossing_.get()->tokens_D + other,
        stream_.get());
  }

  /// Routing, rows and results forward; routing with weights, two rows and results with dw back.
  [[nodiscard]] std::vector<Transfer> transfers_of(const std::vector<Crossing>& crossing_D) const {
    const std::int64_t ids = std::int64_t{4} * shape_.top_k;
    const std::int64_t row = 2 * shape_.hidden_dim;
    struct Bytes {
      std::int64_t of_token;
      std::int64_t of_slot;
    };
    std::vector<Transfer> transfers;
    for (const Bytes& part : {Bytes{ids, 0}, Bytes{row, 0}, Bytes{0, row}, Bytes{2 * ids, 0},
                              Bytes{2 * row, 0}, Bytes{0, row + 4}}) {
      Transfer transfer;
      for (const Crossing& crossing : crossing_D) {
        transfer.sent_D.push_back(crossing.sent_tokens * part.of_token +
                                  crossing.relayed_slots * part.of_slot);
        transfer.received_D.push_back(crossing.arrived_tokens * part.of_token +
                                      crossing.own_slots * part.of_slot);
      }
      transfers.push_back(std::move(transfer));
    }
    return transfers;
  }

  /// In pieces, as a layer's calls do it.
  void enqueue(const Transfer& transfer) {
    for (std::int64_t done = 0;; done += kNetworkPieceBytes) {
      const auto messages = [&](const std::vector<std::int64_t>& bytes_D, std::byte* buffers) {
        std::vector<cuda::HostMessage> all;
        for (std::size_t i = 0; i < others_.size(); ++i) {
          const std::int64_t bytes = std::min(kNetworkPieceBytes, bytes_D[i] - done);
          if (bytes <= 0) continue;
          all.push_back(
              {others_[i], buffers + static_cast<std::int64_t>(i) * kNetworkPieceBytes, bytes});
        }
        return all;
      };
      const auto sends = messages(transfer.sent_D, outgoing_.data());
      const auto receives = messages(transfer.received_D, incoming_.data());
      if (sends.empty() && receives.empty()) return;
      link_.exchange(sends, receives, "a timed step", kDeadlineS, stream_.get());
    }
  }

  struct CrossingTokens {
    std::int32_t tokens_D[kMaxRanks];
  };

  Communicator& group_;
  cuda::HostLink& link_;
  MoeShape shape_;
  Topology topology_;
  HostRouting routing_;
  CallEntry entry_;
  std::vector<int> others_;
  std::vector<std::int32_t> counts_E_;
  cuda::DeviceMemory ids_;
  cuda::DeviceMemory tokens_;
  cuda::DeviceMemory outgoing_;
  cuda::DeviceMemory incoming_;
  cuda::PinnedValue<CrossingTokens> crossing_;
  cuda::OwnedEvent counted_;
  cuda::OwnedStream stream_;
};

/// The slowest rank's median, or the largest number of any rank.
template <class T>
T largest(Communicator& group, T mine) {
  std::vector<T> all(group.size());
  group.all_gather(&mine, all.data(), sizeof mine, "times", kDeadlineS);
  return *std::max_element(all.begin(), all.end());
}

}  // namespace

SizesTimes time_sizes(Communicator& group, cuda::HostLink& link, int device, const MoeShape& shape,
                      const std::vector<std::vector<std::int32_t>>& ids_RTK) {
  Steps steps(group, link, device, shape, ids_RTK);
  constexpr int kWarmUps = 2;
  constexpr int kRepeats = 9;
  struct Timed {
    StepTransfers transfers;
    double known_ms;  ///< until the host knows how much travels
  };
  const auto time = [&](const std::function<std::vector<Crossing>()>& crossing) {
    SamplesMs known_ms;
    SamplesMs ms;
    std::int64_t bytes = 0;
    for (int i = -kWarmUps; i < kRepeats; ++i) {
      group.barrier("a timed step", kDeadlineS);
      const Clock::time_point start = Clock::now();
      const std::vector<Crossing> crossing_D = crossing();
      const double known = ms_since(start);
      steps.travel(crossing_D);
      steps.finish();
      const double all = ms_since(start);
      bytes = steps.bytes_of(crossing_D);
      if (i < 0) continue;
      known_ms.push_back(known);
      ms.push_back(all);
    }
    return Timed{{largest(group, summarize(ms).median_ms), largest(group, bytes)},
                 largest(group, summarize(known_ms).median_ms)};
  };
  SizesTimes times;
  const Timed exact = time([&] { return steps.agree(); });
  times.exact = exact.transfers;
  times.agree_ms = exact.known_ms;

  const std::int64_t all_slots = shape.max_tokens * shape.top_k;
  times.padded = time([&] { return steps.assume(shape.max_tokens, all_slots); }).transfers;

  const int num_hosts = group.topology().num_hosts();
  const double elsewhere = std::pow(1.0 - 1.0 / num_hosts, shape.top_k);
  const auto padded = [](double mean, std::int64_t most) {
    return std::min(most, static_cast<std::int64_t>(std::ceil(1.25 * mean)));
  };
  const std::int64_t tokens =
      padded(static_cast<double>(shape.max_tokens) * (1.0 - elsewhere), shape.max_tokens);
  const std::int64_t slots = padded(static_cast<double>(all_slots) / num_hosts, all_slots);
  times.padded_to_mean = time([&] { return steps.assume(tokens, slots); }).transfers;
  std::int32_t exceeds = 0;
  for (const Crossing& crossing : steps.agree()) {
    if (std::max(crossing.sent_tokens, crossing.arrived_tokens) > tokens ||
        std::max(crossing.own_slots, crossing.relayed_slots) > slots) {
      exceeds = 1;
    }
  }
  times.fits = largest(group, exceeds) == 0;
  return times;
}

}  // namespace megamoe::bench
