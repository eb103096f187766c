// Entering a call: what this rank has for every expert goes to all peers, theirs come back, and
// from everybody's counts follows where every row lies.
//
// Thread i < kMaxExperts works on the rows of expert i, thread kMaxExperts + i on the fetched
// tokens that need expert i first.
#include "kernels/await_peers.cuh"
#include "kernels/launch.h"
#include "kernels/plan/plan.h"
#include "kernels/plan/scan_threads.cuh"
#include "kernels/plan/slot.cuh"

namespace megamoe::gpu {
namespace {

using device::CallControl;
using device::CallHeader;
using device::FailureCode;
using device::FailureRecord;
using device::Signal;

constexpr int kThreads = 2 * kMaxExperts;
constexpr int kWarps = kThreads / device::kWarpSize;
static_assert(kMaxRanks < kThreads);

struct EnterParams {
  std::byte* plan;
  CallKind kind;
  std::uint64_t kind_and_layer;
  std::int32_t num_blocks;  ///< that counted
  bool refused;
  ErrorCode refusal;
  EnterPart part;
};

struct EnterShared {
  CallHeader header;  ///< this rank's
  std::uint64_t epoch;
  std::uint64_t prefix[kThreads + 1];  ///< see lay_out
  std::uint64_t warp_totals[kWarps];
};

/// The call's epoch, and what this rank has to say about itself. One thread.
__device__ void begin_call(const RankView& view, const EnterParams& params, EnterShared& shared) {
  CallControl& control = *view.control();
  control.epoch += 1;
  shared.epoch = control.epoch;
  CallHeader& header = shared.header;
  header = {};
  header.identity.kind_and_layer = params.kind_and_layer;
  header.failure = FailureCode::none;
  if (params.refused) {
    header.failure = FailureCode::call_refused;
    header.value = static_cast<std::int32_t>(params.refusal);
  } else if (params.kind == CallKind::backward) {
    header.identity.forward_epoch = *view.plan_layout.forward_epoch.in(params.plan);
    if (header.identity.forward_epoch == 0) header.failure = FailureCode::forward_failed;
  } else if (control.first_bad_slot != device::kNoBadSlot) {
    header.failure = FailureCode::expert_id_out_of_range;
    header.token = static_cast<std::int64_t>(control.first_bad_slot) / view.routing().top_k;
    header.slot = static_cast<std::int32_t>(control.first_bad_slot % view.routing().top_k);
    header.value = view.plan_layout.ids_TK.in(params.plan)[control.first_bad_slot];
  }
  control.first_bad_slot = device::kNoBadSlot;
  control.call_failed = control.failed_for_good;
}

/// Returns the total of the blocks' counts. The announcement leaves them as they are, for the rest
/// to read again; otherwise each becomes the count before it.
__device__ std::int32_t scan_blocks(std::int32_t* counts_BE, int num_experts, int expert,
                                    int num_blocks, EnterPart part) {
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
      if (part != EnterPart::announcement && block < num_blocks)
        counts_BE[block * num_experts + expert] = sum;
      sum += counts[i];
    }
  }
  return sum;
}

/// This thread's total of rows or of pulls.
__device__ std::int32_t scan_own_column(const RankView& view, int num_blocks, EnterPart part) {
  const int num_experts = view.routing().num_experts;
  const int expert = static_cast<int>(threadIdx.x) % kMaxExperts;
  if (expert >= num_experts) return 0;
  const auto& counts = threadIdx.x < kMaxExperts ? view.scratch_layout.block_rows_BE
                                                 : view.scratch_layout.block_pulls_BE;
  return scan_blocks(counts.in(view.scratch), num_experts, expert, num_blocks, part);
}

/// A rank that has failed for good waits for nobody, so peers may still read what it told them
/// about earlier calls: it tells them nothing but that.
__device__ void publish(const RankView& view, const EnterShared& shared, CallKind kind,
                        std::int32_t own_total) {
  const int num_ranks = view.routing().num_ranks;
  const int num_experts = view.routing().num_experts;
  const int thread = static_cast<int>(threadIdx.x);
  const bool tells = view.control()->failed_for_good == 0;
  if (tells && kind == CallKind::forward && thread < num_experts) {
    for (int step = 0; step < num_ranks; ++step) {
      const int peer = (view.rank + step) % num_ranks;
      view.counts_RE(shared.epoch, peer)[view.rank * num_experts + thread] = own_total;
    }
  }
  if (tells && thread < num_ranks) {
    *view.header(shared.epoch, thread, view.rank) = shared.header;
  }
  __syncthreads();
  signal_peers(view, Signal::entered);
}

/// What is wrong with the call as rank `threadIdx.x` makes it.
__device__ FailureRecord judge_header(const RankView& view, std::uint64_t epoch) {
  FailureRecord failure{};
  const int peer = static_cast<int>(threadIdx.x);
  if (peer >= view.routing().num_ranks) return failure;
  const CallHeader& header = *view.header(epoch, view.rank, peer);
  const CallHeader& first = *view.header(epoch, view.rank, 0);
  failure.code = header.failure;
  failure.rank = view.rank;
  failure.peer = peer;
  failure.token = header.token;
  failure.slot = header.slot;
  failure.value = header.value;
  failure.need = view.routing().num_experts;
  if (failure.code == FailureCode::none &&
      (header.identity.kind_and_layer != first.identity.kind_and_layer ||
       header.identity.forward_epoch != first.identity.forward_epoch)) {
    failure.code = FailureCode::calls_differ;
  }
  return failure;
}

struct ExpertRows {
  std::int32_t total;          ///< over all ranks
  std::int32_t before_source;  ///< of ranks before this one
};

/// Reads expert `threadIdx.x`'s counts of all ranks, and keeps them for the backward call.
__device__ ExpertRows gather_rows(const RankView& view, const EnterParams& params,
                                  std::uint64_t epoch) {
  const int num_experts = view.routing().num_experts;
  const int expert = static_cast<int>(threadIdx.x);
  ExpertRows rows{0, 0};
  if (expert >= num_experts) return rows;
  std::int32_t* kept_RE = view.plan_layout.counts_RE.in(params.plan);
  const std::int32_t* counts_RE =
      params.kind == CallKind::forward ? view.counts_RE(epoch, view.rank) : kept_RE;
  for (int rank = 0; rank < view.routing().num_ranks; ++rank) {
    const std::int32_t count = counts_RE[rank * num_experts + expert];
    if (params.kind == CallKind::forward) kept_RE[rank * num_experts + expert] = count;
    if (rank < view.rank) rows.before_source += count;
    rows.total += count;
  }
  return rows;
}

/// A prefix over expert threads holds padded rows (upper half) and rows (lower half); one over the
/// pull threads behind them adds pulls to the lower half.
__device__ std::int32_t padded(std::uint64_t sums) { return static_cast<std::int32_t>(sums >> 32); }
__device__ std::int32_t plain(std::uint64_t sums) {
  return static_cast<std::int32_t>(sums & 0xffffffffU);
}

__device__ FailureRecord judge_capacity(const RankView& view, const EnterShared& shared) {
  FailureRecord failure{};
  const int rank = static_cast<int>(threadIdx.x);
  if (rank >= view.routing().num_ranks) return failure;
  const int first = view.routing().first_expert_of(rank);
  const std::int64_t need =
      plain(shared.prefix[first + view.routing().experts_per_rank()] - shared.prefix[first]);
  if (need <= view.dims.row_capacity) return failure;
  failure.code = FailureCode::capacity_exceeded;
  failure.rank = view.rank;
  failure.peer = rank;
  failure.need = need;
  failure.capacity = view.dims.row_capacity;
  return failure;
}

__device__ void write_layout(const RankView& view, const EnterParams& params,
                             const EnterShared& shared, const ExpertRows& rows) {
  const RoutingDims& routing = view.routing();
  const int num_local = routing.experts_per_rank();
  const int thread = static_cast<int>(threadIdx.x);
  const std::uint64_t* pull_prefix = shared.prefix + kMaxExperts;
  if (thread < routing.num_experts) {
    const int owner = routing.owner_of(thread);
    const int first = routing.first_expert_of(owner);
    const std::int32_t begin = padded(shared.prefix[thread] - shared.prefix[first]);
    view.scratch_layout.first_row_E.in(view.scratch)[thread] = begin + rows.before_source;
    view.scratch_layout.first_pull_E.in(view.scratch)[thread] =
        plain(pull_prefix[thread] - pull_prefix[0]);
    if (owner == view.rank) {
      view.plan_layout.expert_begin.in(params.plan)[thread - first] = begin;
      view.plan_layout.group_begin_e.in(params.plan)[thread - first] = begin;
      view.plan_layout.group_count_e.in(params.plan)[thread - first] = rows.total;
    }
  }
  if (thread <= routing.num_experts) {
    view.first_pull_E(view.rank)[thread] = plain(pull_prefix[thread] - pull_prefix[0]);
  }
  if (thread <= routing.num_ranks) {
    view.pull_lists(view.rank).destination_begin[thread] =
        plain(pull_prefix[thread * num_local] - pull_prefix[0]);
  }
  if (thread == 0) {
    const int first = routing.first_expert_of(view.rank);
    view.plan_layout.expert_begin.in(params.plan)[num_local] =
        padded(shared.prefix[first + num_local] - shared.prefix[first]);
    if (params.kind == CallKind::forward) {
      *view.plan_layout.forward_epoch.in(params.plan) = shared.epoch;
    }
  }
}

/// Lays out all rows; false where a rank's capacity is too small.
__device__ bool lay_out(const RankView& view, const EnterParams& params, EnterShared& shared,
                        std::int32_t own_total) {
  const ExpertRows rows = gather_rows(view, params, shared.epoch);
  const std::uint64_t padded_rows = round_up(rows.total, kGpuRowAlignment);
  scan_threads(shared, threadIdx.x < kMaxExperts ? padded_rows << 32 | rows.total
                                                 : static_cast<std::uint64_t>(own_total));
  if (fail_call(view, judge_capacity(view, shared))) return false;
  write_layout(view, params, shared, rows);
  return true;
}

__global__ __launch_bounds__(kThreads) void enter_kernel(const __grid_constant__ RankView view,
                                                         const EnterParams params) {
  __shared__ EnterShared shared;
  const bool announces = params.part != EnterPart::rest;
  if (threadIdx.x == 0) {
    if (announces) {
      begin_call(view, params, shared);
    } else {
      shared.epoch = view.control()->epoch;
    }
  }
  __syncthreads();
  const std::int32_t own_total = scan_own_column(view, params.num_blocks, params.part);
  if (announces) publish(view, shared, params.kind, own_total);
  if (params.part == EnterPart::announcement) return;
  const bool entered = view.control()->failed_for_good == 0 &&
                       await_peers(view, Signal::entered, shared.epoch, view.entry_deadline_ns) &&
                       !fail_call(view, judge_header(view, shared.epoch), !params.refused) &&
                       lay_out(view, params, shared, own_total);
  if (entered) return;
  write_no_rows(view, params.plan);
  if (threadIdx.x == 0 && params.kind == CallKind::forward) {
    *view.plan_layout.forward_epoch.in(params.plan) = 0;  // so that its backward call fails
  }
}

/// The epoch is the next call's: peers that wait for any signal of this call, also where this rank
/// has not entered it, then see that they wait in vain.
__global__ __launch_bounds__(kMaxExperts) void give_up_kernel(
    const __grid_constant__ RankView view) {
  if (threadIdx.x == 0) {
    CallControl& control = *view.control();
    control.epoch += 1;
    control.first_bad_slot = device::kNoBadSlot;
    control.call_failed = 1;
    control.failed_for_good = 1;
  }
  __syncthreads();
  for (int what = 0; what < device::kNumSignals; ++what) {
    signal_peers(view, static_cast<Signal>(what));
  }
}

__global__ void reset_kernel(CallControl* control) {
  *control = CallControl{0, device::kNoBadSlot, 0, 0, 0, 0};
}

}  // namespace

void enter_call(const RankView& view, std::byte* plan, CallKind kind, std::uint64_t kind_and_layer,
                std::int64_t num_tokens, cudaStream_t stream, EnterPart part) {
  check_num_tokens(view, num_tokens);
  const SlotShares shares = share_slots(num_tokens * view.routing().top_k);
  enter_kernel<<<1, kThreads, 0, stream>>>(
      view, {plan, kind, kind_and_layer, shares.num_blocks, false, ErrorCode::internal, part});
  check_launch("enter_call");
}

void refuse_call(const RankView& view, std::byte* plan, CallKind kind, ErrorCode code,
                 cudaStream_t stream, EnterPart part) {
  enter_kernel<<<1, kThreads, 0, stream>>>(view, {plan, kind, 0, 0, true, code, part});
  check_launch("refuse_call");
}

void give_up(const RankView& view, cudaStream_t stream) {
  give_up_kernel<<<1, kMaxExperts, 0, stream>>>(view);
  check_launch("give_up");
}

void reset_control(const RankView& view, cudaStream_t stream) {
  reset_kernel<<<1, 1, 0, stream>>>(view.control());
  check_launch("reset_control");
}

void load_enter_kernel() {
  load_kernel(reinterpret_cast<const void*>(&enter_kernel));
  load_kernel(reinterpret_cast<const void*>(&give_up_kernel));
}

}  // namespace megamoe::gpu
