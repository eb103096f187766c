// Where every row lies, from everybody's counts, where ranks have agreed about a call on the host:
// as plan/enter_call.cu lays it out on one host, but for any source, and apart from its experts. By
// all threads of one CTA. Bits equal routing/plan.h.
//
// Thread i < kMaxExperts works on the rows of expert i, thread kMaxExperts + i on the fetched
// tokens that need expert i first.
#pragma once

#include <cstdint>

#include "device/cluster.cuh"
#include "kernels/plan/scan_threads.cuh"
#include "kernels/rank_view.h"

namespace megamoe::gpu {

inline constexpr int kLayoutThreads = 2 * kMaxExperts;
inline constexpr int kLayoutWarps = kLayoutThreads / device::kWarpSize;

struct LayoutShared {
  std::uint64_t prefix[kLayoutThreads + 1];  ///< see scan_columns
  std::uint64_t warp_totals[kLayoutWarps];
};

/// Replaces each block's count by the count before it; returns the total.
__device__ inline std::int32_t scan_blocks(std::int32_t* counts_BE, int num_experts, int expert,
                                           int num_blocks) {
  constexpr int kLoadsInFlight = 32;
  std::int32_t sum = 0;
  for (int first = 0; first < num_blocks; first += kLoadsInFlight) {
    std::int32_t counts[kLoadsInFlight];
#pragma unroll
    for (int i = 0; i < kLoadsInFlight; ++i) {
      const int block = first + i;
      counts[i] = block < num_blocks ? counts_BE[block * num_experts + expert] : 0;
    }
#pragma unroll
    for (int i = 0; i < kLoadsInFlight; ++i) {
      const int block = first + i;
      if (block < num_blocks) counts_BE[block * num_experts + expert] = sum;
      sum += counts[i];
    }
  }
  return sum;
}

/// This thread's total of rows or of pulls.
__device__ inline std::int32_t scan_own_column(const RankView& view, int num_blocks) {
  const int num_experts = view.routing().num_experts;
  const int expert = static_cast<int>(threadIdx.x) % kMaxExperts;
  if (expert >= num_experts) return 0;
  const auto& counts = threadIdx.x < kMaxExperts ? view.scratch_layout.block_rows_BE
                                                 : view.scratch_layout.block_pulls_BE;
  return scan_blocks(counts.in(view.scratch), num_experts, expert, num_blocks);
}

struct ExpertRows {
  std::int32_t total;          ///< over all ranks
  std::int32_t before_source;  ///< of ranks before the view's
};

/// Reads expert `threadIdx.x`'s counts of all ranks, and keeps them unless `kept_RE` is null.
__device__ inline ExpertRows gather_rows(const RankView& view, const std::int32_t* counts_RE,
                                         std::int32_t* kept_RE) {
  const int num_experts = view.routing().num_experts;
  const int expert = static_cast<int>(threadIdx.x);
  ExpertRows rows{0, 0};
  if (expert >= num_experts) return rows;
  for (int rank = 0; rank < view.routing().num_ranks; ++rank) {
    const std::int32_t count = counts_RE[rank * num_experts + expert];
    if (kept_RE != nullptr) kept_RE[rank * num_experts + expert] = count;
    if (rank < view.rank) rows.before_source += count;
    rows.total += count;
  }
  return rows;
}

/// A prefix over expert threads holds padded rows (upper half) and rows (lower half); one over the
/// pull threads behind them adds pulls to the lower half.
__device__ inline std::int32_t padded(std::uint64_t sums) {
  return static_cast<std::int32_t>(sums >> 32);
}
__device__ inline std::int32_t plain(std::uint64_t sums) {
  return static_cast<std::int32_t>(sums & 0xffffffffU);
}

/// Fills shared.prefix. `own_total` is what scan_own_column() gave.
__device__ inline void scan_columns(LayoutShared& shared, const ExpertRows& rows,
                                    std::int32_t own_total) {
  const std::uint64_t padded_rows = round_up(rows.total, kGpuRowAlignment);
  scan_threads(shared, threadIdx.x < kMaxExperts ? padded_rows << 32 | rows.total
                                                 : static_cast<std::uint64_t>(own_total));
}

/// The first row of expert `threadIdx.x` on its rank.
__device__ inline std::int32_t begin_of_expert(const RankView& view, const LayoutShared& shared) {
  const int expert = static_cast<int>(threadIdx.x);
  const int first = view.routing().first_expert_of(view.routing().owner_of(expert));
  return padded(shared.prefix[expert] - shared.prefix[first]);
}

/// Where the rows of the view's rank begin that it sends to each expert, and its pull lists.
__device__ inline void write_source_layout(const RankView& view, const LayoutShared& shared,
                                           const ExpertRows& rows) {
  const RoutingDims& routing = view.routing();
  const int thread = static_cast<int>(threadIdx.x);
  const std::uint64_t* pull_prefix = shared.prefix + kMaxExperts;
  if (thread < routing.num_experts) {
    view.scratch_layout.first_row_E.in(view.scratch)[thread] =
        begin_of_expert(view, shared) + rows.before_source;
    view.scratch_layout.first_pull_E.in(view.scratch)[thread] =
        plain(pull_prefix[thread] - pull_prefix[0]);
  }
  if (thread <= routing.num_experts) {
    view.first_pull_E(view.rank)[thread] = plain(pull_prefix[thread] - pull_prefix[0]);
  }
  if (thread <= routing.num_ranks) {
    view.pull_lists(view.rank).destination_begin[thread] =
        plain(pull_prefix[thread * routing.experts_per_rank()] - pull_prefix[0]);
  }
}

/// Where the rows of this rank's experts lie.
__device__ inline void write_expert_layout(const RankView& view, std::byte* plan,
                                           const LayoutShared& shared, const ExpertRows& rows) {
  const RoutingDims& routing = view.routing();
  const int num_local = routing.experts_per_rank();
  const int first = routing.first_expert_of(view.rank);
  const int thread = static_cast<int>(threadIdx.x);
  if (thread >= first && thread < first + num_local) {
    const std::int32_t begin = begin_of_expert(view, shared);
    view.plan_layout.expert_begin.in(plan)[thread - first] = begin;
    view.plan_layout.group_begin_e.in(plan)[thread - first] = begin;
    view.plan_layout.group_count_e.in(plan)[thread - first] = rows.total;
  }
  if (thread == 0) {
    view.plan_layout.expert_begin.in(plan)[num_local] =
        padded(shared.prefix[first + num_local] - shared.prefix[first]);
  }
}

}  // namespace megamoe::gpu
