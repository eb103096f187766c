// Where a call's launches wait for the hosts of ranks that share the GPU (comm/enqueue_order.h).
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "comm/enqueue_order.h"
#include "comm/gpu_hosts_layout.h"
#include "cuda/stream_order.h"
#include "device/call_control.h"
#include "megamoe/communicator.h"
#include "megamoe/config.h"

namespace megamoe::cuda {

/// Of one call of a rank, within its turn. Nothing happens where the rank has its GPU alone, or
/// while the call is captured.
class CallOrder {
 public:
  CallOrder(RankCalls& calls, const Communicator& communicator, const LayerConfig& config,
            const StreamOrder::Turn& turn)
      : communicator_(communicator),
        entry_patience_(config.entry_deadline_s),
        inner_patience_(config.inner_deadline_s) {
    if (calls.shared == nullptr || turn.is_captured()) return;
    shared_ = calls.shared.get();
    first_point_ = ++calls.num_calls * kPoints;
  }
  CallOrder(const CallOrder&) = delete;
  CallOrder& operator=(const CallOrder&) = delete;
  /// This rank enqueues no more of the call, also where a launch failed.
  ~CallOrder() {
    if (is_shared()) shared_->reach(communicator_.rank(), first_point_ + kPoints - 1);
  }

  /// Whether what tells peers is to be enqueued apart from, and before, what waits for them.
  [[nodiscard]] bool is_shared() const { return shared_ != nullptr; }

  /// This rank's kernels wait for nobody any more.
  void expect_nobody() { outcome_ = EnqueueOrder::Meeting::hopeless; }

  /// This rank has enqueued what tells peers `what`. Returns when they have, too, or once it is
  /// clear that one will not.
  void meet(device::Signal what) {
    meet_at(static_cast<std::uint64_t>(what),
            what == device::Signal::entered ? entry_patience_ : inner_patience_);
  }
  /// Likewise, for a call over several hosts: its ranks on this one meet as often as there are
  /// things to tell, all in the same order.
  void meet_next() {
    if (is_shared()) meet_at(device::kNumSignals + num_met_++, inner_patience_);
  }
  /// The `num_ranks` ranks of this host enqueue one after the other, this one as number `index`:
  /// what each enqueues waits for other hosts, whose ranks do it in this order, too.
  template <class Enqueue>
  void in_turn(int index, int num_ranks, const Enqueue& enqueue) {
    if (!is_shared()) {
      enqueue();
      return;
    }
    for (int turn = 0; turn < num_ranks; ++turn) {
      if (turn == index) enqueue();
      meet_next();
    }
  }

  /// Whether the host has waited for as long as kernels would: they need not wait again, only say
  /// who is missing.
  [[nodiscard]] bool is_late() const { return outcome_ == EnqueueOrder::Meeting::late; }

 private:
  void meet_at(std::uint64_t place, EnqueueOrder::Seconds patience) {
    using Meeting = EnqueueOrder::Meeting;
    const std::uint64_t point = first_point_ + place;
    shared_->reach(communicator_.rank(), point);
    if (outcome_ != Meeting::complete) return;
    outcome_ = shared_->await(point, patience, [this](int rank) {
      const std::vector<Departure> departed = communicator_.departures();
      return std::any_of(departed.begin(), departed.end(),
                         [&](const Departure& departure) { return departure.rank == rank; });
    });
  }

  /// More than a call has: on several hosts two a group of experts, and a turn of each rank of the
  /// host for each of its transfers.
  static constexpr std::uint64_t kPoints = std::uint64_t{1} << 12;
  static_assert(device::kNumSignals + 2 * kMaxNetworkGroups +
                    kMaxRanks * (1 + 2 * kMaxNetworkGroups) <
                kPoints - 1);

  const Communicator& communicator_;
  EnqueueOrder::Seconds entry_patience_;
  EnqueueOrder::Seconds inner_patience_;
  EnqueueOrder* shared_ = nullptr;
  std::uint64_t first_point_ = 0;
  std::uint64_t num_met_ = 0;
  EnqueueOrder::Meeting outcome_ = EnqueueOrder::Meeting::complete;
};

}  // namespace megamoe::cuda
