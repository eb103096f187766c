// Entering a call: what this rank has for every expert goes to all peers, theirs come back, and
// from everybody's counts follows where every row lies.
#include "kernels/await_peers.cuh"
#include "kernels/launch.h"
#include "kernels/plan/lay_out.cuh"
#include "kernels/plan/plan.h"
#include "kernels/plan/slot.cuh"

namespace megamoe::gpu {
namespace {

using device::CallControl;
using device::CallHeader;
using device::FailureCode;
using device::FailureRecord;
using device::Signal;

static_assert(kMaxRanks < kLayoutThreads);

struct EnterParams {
  std::byte* plan;
  CallKind kind;
  std::uint64_t kind_and_layer;
  std::int32_t num_blocks;  ///< that counted
  bool refused;
  ErrorCode refusal;
};

struct EnterShared {
  CallHeader header;  ///< this rank's
  std::uint64_t epoch;
  LayoutShared layout;
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

__device__ FailureRecord judge_capacity(const RankView& view, const LayoutShared& shared) {
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

/// Lays out all rows; false where a rank's capacity is too small.
__device__ bool lay_out(const RankView& view, const EnterParams& params, EnterShared& shared,
                        std::int32_t own_total) {
  std::int32_t* kept_RE = view.plan_layout.counts_RE.in(params.plan);
  const ExpertRows rows = params.kind == CallKind::forward
                              ? gather_rows(view, view.counts_RE(shared.epoch, view.rank), kept_RE)
                              : gather_rows(view, kept_RE, nullptr);
  scan_columns(shared.layout, rows, own_total);
  if (fail_call(view, judge_capacity(view, shared.layout))) return false;
  write_source_layout(view, shared.layout, rows);
  write_expert_layout(view, params.plan, shared.layout, rows);
  if (threadIdx.x == 0 && params.kind == CallKind::forward) {
    *view.plan_layout.forward_epoch.in(params.plan) = shared.epoch;
  }
  return true;
}

__global__ __launch_bounds__(kLayoutThreads) void enter_kernel(
    const __grid_constant__ RankView view, const EnterParams params) {
  __shared__ EnterShared shared;
  if (threadIdx.x == 0) begin_call(view, params, shared);
  __syncthreads();
  const std::int32_t own_total = scan_own_column(view, params.num_blocks);
  publish(view, shared, params.kind, own_total);
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
                std::int64_t num_tokens, cudaStream_t stream) {
  check_num_tokens(view, num_tokens);
  const SlotShares shares = share_slots(num_tokens * view.routing().top_k);
  enter_kernel<<<1, kLayoutThreads, 0, stream>>>(
      view, {plan, kind, kind_and_layer, shares.num_blocks, false, ErrorCode::internal});
  check_launch("enter_call");
}

void refuse_call(const RankView& view, std::byte* plan, CallKind kind, ErrorCode code,
                 cudaStream_t stream) {
  enter_kernel<<<1, kLayoutThreads, 0, stream>>>(view, {plan, kind, 0, 0, true, code});
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
