// What a product that pulls its rows itself needs before it starts: the order of its pulls
// (schedule/pull_order.h) with everything about a pull in one place, so that the pulling warps
// never read a peer's lists; and where each block's counter of rows starts.
//
// Legend: R ranks, e experts of this rank, K slots.
#include "device/row_copy.cuh"
#include "kernels/exchange/pull_role.cuh"
#include "kernels/launch.h"
#include "schedule/pull_order.h"
#include "schedule/row_blocks.h"

namespace megamoe::gpu {
namespace {

/// Lanes that work on one pull, a slot each.
constexpr int kLanesAPull = 16;
static_assert(kMaxSlots <= kLanesAPull);

/// Where the pulls of every source begin that need each of this rank's experts first.
struct PullBegins {
  std::int32_t of_source[kMaxExperts + kMaxRanks];  ///< [R, e + 1]
  std::int32_t num_experts;

  __device__ std::int32_t operator()(int source, int expert) const {
    return of_source[source * (num_experts + 1) + expert];
  }
};

__device__ void read_begins(const RankView& view, PullBegins& begins) {
  const int num_experts = view.routing().experts_per_rank();
  const int first = view.routing().first_expert_of(view.rank);
  const int size = view.routing().num_ranks * (num_experts + 1);
  if (threadIdx.x == 0) begins.num_experts = num_experts;
  for (int i = static_cast<int>(threadIdx.x); i < size; i += kMoverThreads) {
    begins.of_source[i] = view.first_pull_E(i / (num_experts + 1))[first + i % (num_experts + 1)];
  }
  __syncthreads();
}

/// One lane's part of one pull.
__device__ void write_pull(const RankView& view, const PulledRows& rows, int source, int place,
                           const PullToken& pull, int lane) {
  if (lane == 0) {
    view.scratch_layout.ordered_pulls_P.in(view.scratch)[place] = {source, pull.token,
                                                                   pull.num_slots, 0};
  }
  if (lane >= pull.num_slots) return;
  const PullSlot slot = view.pull_lists(source).slots[pull.first_slot + lane];
  const int top_k = view.routing().top_k;
  view.scratch_layout.ordered_rows_PK.in(
      view.scratch)[static_cast<std::int64_t>(place) * top_k + lane] =
      static_cast<std::int32_t>(slot.row);
  rows.origin_C[slot.row] = {source, pull.token, slot.slot};
  if (rows.weight_C == nullptr) return;
  const float* weights_TK = view.symmetric.exchange.staged_weights_TK.in(view.symmetric_R[source]);
  rows.weight_C[slot.row] = weights_TK[static_cast<std::int64_t>(pull.token) * top_k + slot.slot];
}

template <class Order>
__device__ void write_pulls(const RankView& view, const PulledRows& rows, const Order& order) {
  const int thread = static_cast<int>(blockIdx.x) * kMoverThreads + static_cast<int>(threadIdx.x);
  const int num_teams = static_cast<int>(gridDim.x) * kMoverThreads / kLanesAPull;
  const int num_ranks = view.routing().num_ranks;
  int next = thread / kLanesAPull;
  for (int turn = 0; turn < num_ranks; ++turn) {
    const int source = (view.rank + turn) % num_ranks;
    const PullLists lists = view.pull_lists(source);
    const std::int64_t begin = lists.destination_begin[view.rank];
    const int num_pulls = order.num_tokens_of(source);
    for (; next < num_pulls; next += num_teams) {
      write_pull(view, rows, source, order.place_of(source, next), lists.tokens[begin + next],
                 thread % kLanesAPull);
    }
    next -= num_pulls;
  }
}

/// A warp an expert.
__device__ void start_counters(const RankView& view, std::byte* plan) {
  const std::int32_t* begin_e = view.plan_layout.group_begin_e.in(plan);
  const std::int32_t* count_e = view.plan_layout.group_count_e.in(plan);
  std::uint32_t* rows_arrived = view.scratch_layout.rows_arrived.in(view.scratch);
  for (int expert = global_warp(); expert < view.routing().experts_per_rank();
       expert += num_global_warps()) {
    const int num_rows = count_e[expert];
    const int first = schedule::block_of_row(begin_e[expert]);
    const int num_blocks = schedule::ceil_div(num_rows, schedule::kRowsPerBlock);
    for (int block = device::lane_idx(); block < num_blocks; block += device::kWarpSize) {
      rows_arrived[first + block] =
          static_cast<std::uint32_t>(schedule::num_pads_of_block(num_rows, block));
    }
  }
}

__global__ __launch_bounds__(kMoverThreads) void order_kernel(const __grid_constant__ RankView view,
                                                              std::byte* plan,
                                                              const PulledRows rows,
                                                              const RowCut cut) {
  __shared__ PullBegins begins;
  if (view.control()->call_failed != 0) return;
  read_begins(view, begins);
  const schedule::PullOrder order(view.routing().num_ranks, view.rank,
                                  view.routing().experts_per_rank(),
                                  [](int source, int expert) { return begins(source, expert); });
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    for (int by = 0; by < kNumPullers; ++by) {
      view.scratch_layout.pull_progress.in(view.scratch)[by] = {
          0, static_cast<std::uint32_t>(order.num_tokens()), 0};
    }
    *view.scratch_layout.num_reduced.in(view.scratch) = 0;
    for (int product = 0; product < device::kNumProductKinds; ++product) {
      *view.num_tiles_taken(static_cast<device::ProductKind>(product)) = 0;
    }
  }
  start_counters(view, plan);
  write_pulls(view, rows, order);
  clear_pads(view, plan, cut, rows);
  device::fence_async_global();  // pads are read through the copy engine
}

}  // namespace

void order_pulls(const RankView& view, std::byte* plan, const PulledRows& rows,
                 cudaStream_t stream) {
  order_kernel<<<num_multiprocessors() * kMoverBlocksAnSm, kMoverThreads, 0, stream>>>(
      view, plan, rows, RowCut(view.dims.hidden_dim));
  check_launch("order_pulls");
}

void load_order_kernel() { load_kernel(reinterpret_cast<const void*>(&order_kernel)); }

}  // namespace megamoe::gpu
