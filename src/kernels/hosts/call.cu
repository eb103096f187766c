// How a call that ranks have agreed on begins on the device, and how the ranks of a host meet in
// it.
#include "kernels/await_peers.cuh"
#include "kernels/hosts/hosts.h"
#include "kernels/hosts/lay_out.cuh"
#include "kernels/launch.h"
#include "kernels/plan/slot.cuh"

namespace megamoe::gpu {
namespace {

using device::CallControl;
using device::SignalValue;

constexpr int kMeetThreads = 96;
static_assert(kMaxRanks <= kMeetThreads);

__global__ __launch_bounds__(kMaxExperts) void publish_kernel(const __grid_constant__ RankView view,
                                                              std::byte* plan,
                                                              const std::int32_t num_blocks,
                                                              CallCounts* counts) {
  const int expert = static_cast<int>(threadIdx.x);
  const int num_experts = view.routing().num_experts;
  if (expert < num_experts) {
    const std::int32_t* rows_BE = view.scratch_layout.block_rows_BE.in(view.scratch);
    std::int32_t sum = 0;
    for (int block = 0; block < num_blocks; ++block) sum += rows_BE[block * num_experts + expert];
    counts->counts_E[expert] = sum;
  }
  if (expert != 0) return;
  CallControl& control = *view.control();
  const std::uint64_t bad = control.first_bad_slot;
  counts->first_bad_slot = bad == device::kNoBadSlot ? -1 : static_cast<std::int64_t>(bad);
  counts->bad_id = bad == device::kNoBadSlot ? 0 : view.plan_layout.ids_TK.in(plan)[bad];
  control.first_bad_slot = device::kNoBadSlot;
}

/// counts_RE is null in a backward call.
__global__ __launch_bounds__(kLayoutThreads) void enter_agreed_kernel(
    const __grid_constant__ RankView view, std::byte* plan, const std::int32_t* counts_RE,
    const std::int32_t num_blocks) {
  __shared__ LayoutShared shared;
  CallControl& control = *view.control();
  const bool failed = control.failed_for_good != 0;
  __syncthreads();
  if (threadIdx.x == 0) {
    control.epoch += 1;
    control.call_failed = failed ? 1 : 0;
    if (counts_RE != nullptr) {
      *view.plan_layout.forward_epoch.in(plan) = failed ? 0 : control.epoch;
    }
  }
  if (failed) {
    write_no_rows(view, plan);
    return;
  }
  std::int32_t* kept_RE = view.plan_layout.counts_RE.in(plan);
  const std::int32_t own_total = scan_own_column(view, num_blocks);
  const ExpertRows rows = counts_RE != nullptr ? gather_rows(view, counts_RE, kept_RE)
                                               : gather_rows(view, kept_RE, nullptr);
  scan_columns(shared, rows, own_total);
  write_source_layout(view, shared, rows);
  write_expert_layout(view, plan, shared, rows);
}

__global__ __launch_bounds__(kLayoutThreads) void lay_out_source_kernel(
    const __grid_constant__ RankView source, std::byte* plan, const std::int32_t num_blocks) {
  __shared__ LayoutShared shared;
  if (source.control()->call_failed != 0) return;
  const std::int32_t own_total = scan_own_column(source, num_blocks);
  const ExpertRows rows = gather_rows(source, source.plan_layout.counts_RE.in(plan), nullptr);
  scan_columns(shared, rows, own_total);
  write_source_layout(source, shared, rows);
}

/// The words of one signal: `at(rank, from)` is what rank `from` of this host writes at `rank`.
struct MeetOnHost {
  Region<SignalValue> signals;
  std::int64_t first;  ///< of the signal among them

  __device__ SignalValue* at(const RankView& view, int rank, int from) const {
    return signals.in(view.symmetric_R[rank]) + first + from;
  }
};

/// The rank of this host that the thread stands for; -1 for none.
__device__ int rank_of_thread(const HostView& host) {
  const int thread = static_cast<int>(threadIdx.x);
  return thread < host.num_ranks ? host.first_rank + thread : -1;
}

__device__ void signal_host(const RankView& view, const HostView& host, const MeetOnHost& what) {
  const int rank = rank_of_thread(host);
  if (rank < 0) return;
  device::store_release_sys(what.at(view, rank, view.rank), device::signal_value(*view.control()));
}

/// False where a rank of this host did not come or has failed: the call has failed then.
__device__ bool await_host(const RankView& view, const HostView& host, const MeetOnHost& what,
                           device::Signal reported_as, std::uint64_t deadline_ns) {
  const std::uint64_t epoch = view.control()->epoch;
  const int rank = rank_of_thread(host);
  device::FailureRecord failure{};
  if (rank >= 0) {
    const std::uint32_t* has_left = view.has_left_R == nullptr ? nullptr : view.has_left_R + rank;
    const device::Arrival arrival =
        device::await_signal(what.at(view, view.rank, rank), epoch, deadline_ns, has_left);
    failure.code = arrival.failure;
    failure.rank = view.rank;
    failure.peer = rank;
    failure.awaited = reported_as;
    failure.expected = epoch;
    failure.seen = device::epoch_of(arrival.seen);
  }
  return !fail_call(view, failure);
}

__global__ __launch_bounds__(kMeetThreads) void announce_on_host_kernel(
    const __grid_constant__ RankView view, const HostView host, const MeetOnHost what) {
  signal_host(view, host, what);
}

__global__ __launch_bounds__(kMeetThreads) void meet_on_host_kernel(
    const __grid_constant__ RankView view, const HostView host, std::byte* plan,
    const MeetOnHost what, const device::Signal reported_as) {
  const bool failed = view.control()->call_failed != 0;
  signal_host(view, host, what);
  if (failed || !await_host(view, host, what, reported_as, view.inner_deadline_ns)) {
    write_no_rows(view, plan);
  }
}

__device__ bool link_is_over(const HostView& host) {
  return *const_cast<const volatile std::uint32_t*>(host.link_is_over) != 0;
}

__global__ __launch_bounds__(kMeetThreads) void announce_group_kernel(
    const __grid_constant__ RankView view, const HostView host, const MeetOnHost what) {
  if (threadIdx.x == 0 && link_is_over(host)) {
    view.control()->call_failed = 1;
    view.control()->failed_for_good = 1;
  }
  __syncthreads();
  signal_host(view, host, what);
}

__global__ __launch_bounds__(kMeetThreads) void await_group_kernel(
    const __grid_constant__ RankView view, const HostView host, std::byte* plan,
    const MeetOnHost what, const device::Signal reported_as) {
  const bool failed = view.control()->call_failed != 0;
  __syncthreads();
  const std::uint64_t deadline_ns = view.inner_deadline_ns + view.inner_deadline_ns / 2;
  if (!failed && await_host(view, host, what, reported_as, deadline_ns)) return;
  if (plan != nullptr) write_no_rows(view, plan);
}

__global__ __launch_bounds__(kMeetThreads) void judge_peers_kernel(
    const __grid_constant__ RankView view, const HostView host, const PeersOnHosts peers,
    const std::int32_t* failed_D) {
  const bool failed = view.control()->call_failed != 0;
  __syncthreads();
  if (failed) return;
  const int peer = static_cast<int>(threadIdx.x);
  device::FailureRecord failure{};
  if (peer < peers.count && (link_is_over(host) || failed_D[peer] != 0)) {
    failure.code = device::FailureCode::peer_failed;
    failure.rank = view.rank;
    failure.peer = peers.ranks[peer];
    failure.awaited = device::Signal::results_sent;
    failure.expected = view.control()->epoch;
    failure.seen = failure.expected - 1;
  }
  fail_call(view, failure);
}

/// As give_up() does: peers that wait for anything of this call see that they wait in vain.
__global__ __launch_bounds__(kMeetThreads) void give_up_on_host_kernel(
    const __grid_constant__ RankView view, const HostView host) {
  if (threadIdx.x == 0) {
    CallControl& control = *view.control();
    control.epoch += 1;
    control.first_bad_slot = device::kNoBadSlot;
    control.call_failed = 1;
    control.failed_for_good = 1;
  }
  __syncthreads();
  const int num_ranks = view.routing().num_ranks;
  for (int what = 0; what < device::kNumSignals; ++what) {
    signal_host(view, host, {view.symmetric.signals, std::int64_t{what} * num_ranks});
  }
  for (int what = 0; what < kNumGroupSignals * kMaxNetworkGroups; ++what) {
    signal_host(view, host, {host.group_signals, std::int64_t{what} * num_ranks});
  }
}

std::int32_t num_blocks_of(const RankView& view, std::int64_t num_tokens) {
  check_num_tokens(view, num_tokens);
  return share_slots(num_tokens * view.routing().top_k).num_blocks;
}

MeetOnHost signal_of_call(const RankView& view, device::Signal what) {
  return {view.symmetric.signals, std::int64_t{static_cast<int>(what)} * view.routing().num_ranks};
}
MeetOnHost signal_of_group(const RankView& view, const HostView& host, GroupSignal what,
                           std::int32_t group) {
  const std::int64_t number = static_cast<int>(what) * kMaxNetworkGroups + group;
  return {host.group_signals, number * view.routing().num_ranks};
}
device::Signal reported_as(GroupSignal what) {
  return what == GroupSignal::rows_arrived ? device::Signal::rows_staged
                                           : device::Signal::results_sent;
}

}  // namespace

void publish_counts(const RankView& view, std::byte* plan, std::int64_t num_tokens,
                    CallCounts* counts, cudaStream_t stream) {
  publish_kernel<<<1, kMaxExperts, 0, stream>>>(view, plan, num_blocks_of(view, num_tokens),
                                                counts);
  check_launch("publish_counts");
}

void enter_agreed_call(const RankView& view, std::byte* plan, const std::int32_t* counts_RE,
                       std::int64_t num_tokens, cudaStream_t stream) {
  enter_agreed_kernel<<<1, kLayoutThreads, 0, stream>>>(view, plan, counts_RE,
                                                        num_blocks_of(view, num_tokens));
  check_launch("enter_agreed_call");
}

void publish_for_source(const RankView& source, std::byte* plan, const std::int32_t* ids_TK,
                        std::int64_t num_tokens, cudaStream_t stream) {
  count_relayed_slots(source, ids_TK, num_tokens, stream);
  lay_out_source_kernel<<<1, kLayoutThreads, 0, stream>>>(source, plan,
                                                          num_blocks_of(source, num_tokens));
  check_launch("lay_out_source");
  write_relayed_lists(source, ids_TK, num_tokens, stream);
}

void announce_on_host(const RankView& view, const HostView& host, device::Signal what,
                      cudaStream_t stream) {
  announce_on_host_kernel<<<1, kMeetThreads, 0, stream>>>(view, host, signal_of_call(view, what));
  check_launch("announce_on_host");
}

void meet_on_host(const RankView& view, const HostView& host, std::byte* plan, device::Signal what,
                  cudaStream_t stream) {
  meet_on_host_kernel<<<1, kMeetThreads, 0, stream>>>(view, host, plan, signal_of_call(view, what),
                                                      what);
  check_launch("meet_on_host");
}

void announce_group(const RankView& view, const HostView& host, GroupSignal what,
                    std::int32_t group, cudaStream_t stream) {
  announce_group_kernel<<<1, kMeetThreads, 0, stream>>>(view, host,
                                                        signal_of_group(view, host, what, group));
  check_launch("announce_group");
}

void await_group(const RankView& view, const HostView& host, std::byte* plan, GroupSignal what,
                 std::int32_t group, cudaStream_t stream) {
  await_group_kernel<<<1, kMeetThreads, 0, stream>>>(
      view, host, plan, signal_of_group(view, host, what, group), reported_as(what));
  check_launch("await_group");
}

void judge_peers(const RankView& view, const HostView& host, const PeersOnHosts& peers,
                 const std::int32_t* failed_D, cudaStream_t stream) {
  judge_peers_kernel<<<1, kMeetThreads, 0, stream>>>(view, host, peers, failed_D);
  check_launch("judge_peers");
}

void give_up_on_host(const RankView& view, const HostView& host, cudaStream_t stream) {
  give_up_on_host_kernel<<<1, kMeetThreads, 0, stream>>>(view, host);
  check_launch("give_up_on_host");
}

void load_lists_of_hosts_kernels();
void load_rows_of_hosts_kernels();
void load_moves_of_hosts_kernels();

void load_hosts_kernels() {
  load_kernel(reinterpret_cast<const void*>(&publish_kernel));
  load_kernel(reinterpret_cast<const void*>(&enter_agreed_kernel));
  load_kernel(reinterpret_cast<const void*>(&lay_out_source_kernel));
  load_kernel(reinterpret_cast<const void*>(&announce_on_host_kernel));
  load_kernel(reinterpret_cast<const void*>(&meet_on_host_kernel));
  load_kernel(reinterpret_cast<const void*>(&announce_group_kernel));
  load_kernel(reinterpret_cast<const void*>(&await_group_kernel));
  load_kernel(reinterpret_cast<const void*>(&judge_peers_kernel));
  load_kernel(reinterpret_cast<const void*>(&give_up_on_host_kernel));
  load_lists_of_hosts_kernels();
  load_rows_of_hosts_kernels();
  load_moves_of_hosts_kernels();
}

}  // namespace megamoe::gpu
