// What every kernel of the exchange knows about its rank and the group: sizes, where what lies, and
// the peers' memory as plain pointers. Passed to kernels by value.
//
// Legend: R ranks, T tokens, K slots, E experts, H hidden.
#pragma once

#include <cstddef>
#include <cstdint>

#include "comm/gpu_workspace_layout.h"

namespace megamoe::gpu {

enum class CallKind : std::int32_t { forward, backward };

struct RankView {
  WorkspaceDims dims;
  GpuSymmetricLayout symmetric;
  CallPlanLayout plan_layout;
  PlanScratchLayout scratch_layout;
  std::int32_t rank = 0;
  std::byte* symmetric_R[kMaxRanks] = {};  ///< the rank's own memory has one address everywhere
  std::byte* scratch = nullptr;
  device::FailureRecord* failure = nullptr;   ///< pinned host memory
  const std::uint32_t* has_left_R = nullptr;  ///< pinned host memory: not 0 once a rank has left
  std::uint64_t entry_deadline_ns = 0;
  std::uint64_t inner_deadline_ns = 0;

  [[nodiscard]] MEGAMOE_HOST_DEVICE const RoutingDims& routing() const { return dims.routing; }
  [[nodiscard]] MEGAMOE_HOST_DEVICE device::CallControl* control() const {
    return scratch_layout.control.in(scratch);
  }

  /// How many of a product's tiles clusters have taken, where they take them from a counter.
  [[nodiscard]] MEGAMOE_HOST_DEVICE std::uint32_t* num_tiles_taken(
      device::ProductKind product) const {
    return scratch_layout.num_tiles_taken.in(scratch) + static_cast<int>(product);
  }

  /// The signal in `at`'s memory that `from` writes.
  [[nodiscard]] MEGAMOE_HOST_DEVICE device::SignalValue* signal(device::Signal what, int at,
                                                                int from) const {
    return symmetric.signals.in(symmetric_R[at]) + static_cast<int>(what) * dims.routing.num_ranks +
           from;
  }
  /// What `from` wrote into `at`'s memory when it entered call `epoch`.
  [[nodiscard]] MEGAMOE_HOST_DEVICE device::CallHeader* header(std::uint64_t epoch, int at,
                                                               int from) const {
    return symmetric.headers_2R.in(symmetric_R[at]) +
           static_cast<int>(epoch % 2) * dims.routing.num_ranks + from;
  }
  [[nodiscard]] MEGAMOE_HOST_DEVICE std::int32_t* counts_RE(std::uint64_t epoch, int at) const {
    return symmetric.counts_2RE.in(symmetric_R[at]) +
           static_cast<std::int64_t>(epoch % 2) * dims.routing.num_ranks * kMaxExperts;
  }
  /// Where `source`'s pulls begin that need each expert first, and their end.
  [[nodiscard]] MEGAMOE_HOST_DEVICE std::int32_t* first_pull_E(int source) const {
    return symmetric.first_pull_E.in(symmetric_R[source]);
  }
  [[nodiscard]] MEGAMOE_HOST_DEVICE PullLists pull_lists(int source) const {
    std::byte* base = symmetric_R[source];
    return {symmetric.exchange.destination_begin.in(base), symmetric.exchange.pull_tokens.in(base),
            symmetric.exchange.pull_slots.in(base)};
  }
};

/// The view without pointers and deadlines. Throws as check_gpu_limits().
RankView make_rank_view(const WorkspaceDims& dims, int rank);

/// Throws Error(internal) where a call has more tokens than the buffers hold.
void check_num_tokens(const RankView& view, std::int64_t num_tokens);

}  // namespace megamoe::gpu
