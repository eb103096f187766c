// The buffer map of the GPU backend: what it adds to workspace_layout.h, on host and device.
//
// Legend: R ranks, T max tokens of a rank, K slots, E experts, e = E/R experts of a rank, B blocks
// that plan.
//
// Every expert's rows start at a multiple of kGpuRowAlignment, so that tiles of weight gradients
// never cross experts. Row buffers are those of local_layout() with padded_row_capacity() rows. The
// layer without overlap needs no others: o rows lie in dy_CH (forward), dx rows in x_CH once the
// weight gradients have read it (backward).
#pragma once

#include <cstdint>

#include "comm/workspace_layout.h"
#include "device/call_control.h"

namespace megamoe {

inline constexpr std::int64_t kGpuRowAlignment = 64;

/// The most that the kernels of the exchange take.
inline constexpr std::int32_t kMaxRanks = 72;
inline constexpr std::int32_t kMaxExperts = 512;
inline constexpr std::int32_t kMaxSlots = 16;

/// Rows that the GPU's row buffers need for any distribution of `row_capacity` rows over the
/// experts of a rank.
constexpr std::int64_t padded_row_capacity(const WorkspaceDims& dims) {
  const std::int64_t num_experts = dims.routing.num_experts / dims.routing.num_ranks;
  const std::int64_t experts_with_rows =
      num_experts < dims.row_capacity ? num_experts : dims.row_capacity;
  return round_up(dims.row_capacity + experts_with_rows * (kGpuRowAlignment - 1), kGpuRowAlignment);
}

/// The symmetric memory of a rank on the GPU. What peers write at any time lies first, at places
/// that depend on the number of ranks alone: layers of different shapes share a workspace. Headers
/// and counts exist twice and calls alternate: a rank whose call failed may enter the next call
/// before its peers have read what it wrote for this one, but never the one after that.
struct GpuSymmetricLayout {
  Region<device::SignalValue> signals;    ///< [kNumSignals, R], written by rank r
  Region<device::CallHeader> headers_2R;  ///< written by rank r
  Region<std::int32_t> counts_2RE;        ///< row r written by rank r
  SymmetricLayout exchange;
  Region<std::int32_t> first_pull_E;  ///< E + 1: where the rank's pulls begin that need each
                                      ///< expert first, and their end
  std::int64_t bytes = 0;
};

inline GpuSymmetricLayout gpu_symmetric_layout(const WorkspaceDims& dims) {
  const std::int64_t num_ranks = dims.routing.num_ranks;
  RegionAllocator regions;
  GpuSymmetricLayout layout;
  layout.signals = regions.take<device::SignalValue>(device::kNumSignals * num_ranks);
  layout.headers_2R = regions.take<device::CallHeader>(2 * num_ranks);
  layout.counts_2RE = regions.take<std::int32_t>(2 * num_ranks * kMaxExperts);
  layout.exchange = symmetric_layout(dims, regions.bytes());
  RegionAllocator behind_exchange(layout.exchange.bytes);
  layout.first_pull_E = behind_exchange.take<std::int32_t>(dims.routing.num_experts + 1);
  layout.bytes = behind_exchange.bytes();
  return layout;
}

/// The plan of a call as its backward call needs it again: device memory of the call's context.
struct CallPlanLayout {
  Region<std::int32_t> ids_TK;
  Region<float> weights_TK;
  Region<std::int32_t> counts_RE;
  Region<std::int64_t> expert_begin;   ///< e + 1
  Region<std::int32_t> group_begin_e;  ///< the same as products read them, and
  Region<std::int32_t> group_count_e;  ///< rows without padding; all 0 where the call failed
  Region<std::int32_t> kept_count_e;   ///< rows of the group whose g and u are kept, and
  Region<std::int32_t> other_begin_e;  ///< the group's other rows, which follow them
  Region<std::int32_t> other_count_e;
  Region<std::uint64_t> forward_epoch;  ///< one; 0 where the forward call failed
  std::int64_t bytes = 0;
};

inline CallPlanLayout call_plan_layout(const WorkspaceDims& dims) {
  const std::int64_t slots = dims.max_tokens * dims.routing.top_k;
  const std::int64_t num_experts = dims.routing.num_experts / dims.routing.num_ranks;
  RegionAllocator regions;
  CallPlanLayout layout;
  layout.ids_TK = regions.take<std::int32_t>(slots);
  layout.weights_TK = regions.take<float>(slots);
  layout.counts_RE = regions.take<std::int32_t>(static_cast<std::int64_t>(dims.routing.num_ranks) *
                                                dims.routing.num_experts);
  layout.expert_begin = regions.take<std::int64_t>(num_experts + 1);
  layout.group_begin_e = regions.take<std::int32_t>(num_experts);
  layout.group_count_e = regions.take<std::int32_t>(num_experts);
  layout.kept_count_e = regions.take<std::int32_t>(num_experts);
  layout.other_begin_e = regions.take<std::int32_t>(num_experts);
  layout.other_count_e = regions.take<std::int32_t>(num_experts);
  layout.forward_epoch = regions.take<std::uint64_t>(1);
  layout.bytes = regions.bytes();
  return layout;
}

/// Most blocks that count slots and write pull lists.
inline constexpr std::int64_t kMaxPlanBlocks = 128;

/// A token as an overlapping product pulls it; its rows are its line of ordered_rows_PK.
struct alignas(16) OrderedPull {
  std::int32_t source;
  std::int32_t token;
  std::int32_t num_rows;
  std::int32_t unused;
};

/// How far the pulls of a kernel have come.
struct PullProgress {
  std::uint32_t next;  ///< the next pull that nobody has taken
  std::uint32_t num_pulls;
  std::uint32_t num_done;  ///< pulls of the first pass by warps that have done all of theirs
};
/// The kernels of a call that pull, and where they find their progress.
enum class PulledBy : std::int32_t { product, weight_gradients };
inline constexpr std::int32_t kNumPullers = 2;

/// Most tokens that a rank pulls in a call: each fills at least one row.
constexpr std::int64_t max_ordered_pulls(const WorkspaceDims& dims) {
  const std::int64_t tokens = dims.routing.num_ranks * dims.max_tokens;
  return tokens < dims.row_capacity ? tokens : dims.row_capacity;
}

/// What the kernels of one plan hand to each other; one for all calls of a rank.
struct PlanScratchLayout {
  Region<device::CallControl> control;
  Region<std::int32_t> block_rows_BE;   ///< slots of each expert in a block, then before it
  Region<std::int32_t> block_pulls_BE;  ///< fetched tokens by first expert needed, likewise
  Region<std::int32_t> block_slots_B;   ///< slots that are not empty, likewise
  Region<std::int32_t> first_row_E;     ///< of this source at the expert's rank
  Region<std::int32_t> first_pull_E;    ///< of this source's tokens that need the expert first
  // Of overlapping products only. P: max_ordered_pulls().
  Region<PullProgress> pull_progress;     ///< by PulledBy
  Region<std::uint32_t> num_reduced;      ///< tokens whose dx weight gradients have taken to reduce
  Region<std::uint32_t> num_tiles_taken;  ///< by all launches since order_pulls(); by ProductKind
  Region<OrderedPull> ordered_pulls_P;
  Region<std::int32_t> ordered_rows_PK;
  Region<std::uint32_t> rows_arrived;  ///< of each 64 rows, with their pads: schedule/row_blocks.h
  std::int64_t bytes = 0;
};

inline PlanScratchLayout plan_scratch_layout(const WorkspaceDims& workspace) {
  const RoutingDims& dims = workspace.routing;
  const std::int64_t num_pulls = max_ordered_pulls(workspace);
  RegionAllocator regions;
  PlanScratchLayout layout;
  layout.control = regions.take<device::CallControl>(1);
  layout.block_rows_BE = regions.take<std::int32_t>(kMaxPlanBlocks * dims.num_experts);
  layout.block_pulls_BE = regions.take<std::int32_t>(kMaxPlanBlocks * dims.num_experts);
  layout.block_slots_B = regions.take<std::int32_t>(kMaxPlanBlocks);
  layout.first_row_E = regions.take<std::int32_t>(dims.num_experts);
  layout.first_pull_E = regions.take<std::int32_t>(dims.num_experts);
  layout.pull_progress = regions.take<PullProgress>(kNumPullers);
  layout.num_reduced = regions.take<std::uint32_t>(1);
  layout.num_tiles_taken = regions.take<std::uint32_t>(device::kNumProductKinds);
  layout.ordered_pulls_P = regions.take<OrderedPull>(num_pulls);
  layout.ordered_rows_PK = regions.take<std::int32_t>(num_pulls * dims.top_k);
  layout.rows_arrived =
      regions.take<std::uint32_t>(padded_row_capacity(workspace) / kGpuRowAlignment);
  layout.bytes = regions.bytes();
  return layout;
}

/// What only the rank itself uses. The scratch lies first: its control block is that of all layers.
struct GpuLocalLayout {
  PlanScratchLayout scratch;
  LocalLayout rows;              ///< with padded_row_capacity() rows
  Region<std::byte> spare_plan;  ///< for calls that the host refuses before they have a plan
  std::int64_t bytes = 0;
};

inline GpuLocalLayout gpu_local_layout(const WorkspaceDims& dims) {
  WorkspaceDims padded = dims;
  padded.row_capacity = padded_row_capacity(dims);
  GpuLocalLayout layout;
  layout.scratch = plan_scratch_layout(dims);
  layout.rows = local_layout(padded, layout.scratch.bytes);
  RegionAllocator regions(layout.rows.bytes);
  layout.spare_plan = regions.take<std::byte>(call_plan_layout(dims).bytes);
  layout.bytes = regions.bytes();
  return layout;
}

}  // namespace megamoe
