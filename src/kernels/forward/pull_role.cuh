// The pull warp of a product that pulls its rows: moves each token once from its source, through
// two chunks of shared memory, to every row that it fills, and counts the rows that are in place.
//
// Warps of all CTAs take pulls from one list in its order (schedule/pull_order.h), so a CTA that
// has not started yet holds nobody up: whatever a tile waits for is taken by a warp that runs, and
// pull warps wait for nothing but their own copies.
//
// A lane i < num_rows stores to the pull's i-th row; all lanes commit and wait in step, because
// bulk groups belong to a thread. A row is counted by the lane that stored it, once `wait_group`
// (not .read) says that its stores are in memory; one group late, so that the pipe never runs
// empty.
#pragma once

#include <cstdint>

#include "device/barrier.cuh"
#include "device/cluster.cuh"
#include "device/flags.cuh"
#include "device/row_copy.cuh"
#include "device/trace.cuh"
#include "kernels/forward/pull_params.h"
#include "kernels/products/row_product.h"
#include "kernels/rank_view.h"
#include "schedule/row_blocks.h"

namespace megamoe::gpu {

inline constexpr int kPullStages = 2;

struct PullShared {
  alignas(128) std::byte chunks[kPullStages][kPullChunkBytes];
  std::uint64_t chunk_arrived[kPullStages];
  products::GroupedTile next_tile;  ///< the load role's (arrived_rows.cuh)
};

inline constexpr std::int32_t kNoBlock = -1;

/// A chunk on its way into shared memory.
struct ChunkInFlight {
  std::uint32_t num_bytes = 0;
  std::byte* to = nullptr;        ///< this lane's, null if it stores nothing
  bool completes_rows = false;    ///< the same in all lanes
  std::int32_t block = kNoBlock;  ///< of this lane's row
};

class PullRing {
 public:
  __device__ PullRing(PullShared& shared, std::uint32_t* rows_arrived)
      : chunks_(device::shared_address(shared.chunks)),
        arrived_(device::shared_address(shared.chunk_arrived)),
        rows_arrived_(rows_arrived) {}

  /// Begins to load `chunk`, then stores the chunk before.
  __device__ void move(const std::byte* from, const ChunkInFlight& chunk) {
    // Of the groups committed so far all but the last kPullStages - 2 have left their chunks.
    device::wait_stores_read<kPullStages - 2>();
    __syncwarp();
    if (device::lane_idx() == 0) {
      const std::uint32_t arrived = arrived_ + load_.slot * 8U;
      device::arrive_expecting(arrived, chunk.num_bytes);
      device::load_passing_bytes(chunks_ + load_.slot * kPullChunkBytes, from, chunk.num_bytes,
                                 arrived);
    }
    load_.advance();
    store_pending();
    pending_ = chunk;
  }

  /// Everything moved so far is in place and counted.
  __device__ void finish() {
    store_pending();
    device::wait_stores_complete<0>();
    if (stored_completes_rows_) count_row(stored_block_);
    stored_completes_rows_ = false;
    __syncwarp();
  }

 private:
  __device__ void store_pending() {
    if (pending_.num_bytes == 0) return;
    device::wait(arrived_ + store_.slot * 8U, store_.parity);
    if (pending_.to != nullptr) {
      device::store_passing_bytes(pending_.to, chunks_ + store_.slot * kPullChunkBytes,
                                  pending_.num_bytes);
    }
    device::commit_stores();
    store_.advance();
    if (stored_completes_rows_) {
      device::wait_stores_complete<1>();
      count_row(stored_block_);
    }
    stored_completes_rows_ = pending_.completes_rows;
    stored_block_ = pending_.block;
    pending_ = {};
  }

  __device__ void count_row(std::int32_t block) {
    if (block != kNoBlock) device::signal<device::Reach::gpu>(rows_arrived_ + block);
  }

  std::uint32_t chunks_;
  std::uint32_t arrived_;
  std::uint32_t* rows_arrived_;
  device::RingPosition<kPullStages> load_;
  device::RingPosition<kPullStages> store_;
  ChunkInFlight pending_;
  bool stored_completes_rows_ = false;  ///< the group before the last commit
  std::int32_t stored_block_ = kNoBlock;
};

/// A pull that this warp has taken.
struct TakenPull {
  OrderedPull pull{};
  std::int32_t row = 0;    ///< lane i < num_rows: the i-th row that the token fills
  std::int32_t pass = -1;  ///< -1: there are no more
};

__device__ inline PullProgress* pull_progress(const RankView& view, PulledBy by) {
  return view.scratch_layout.pull_progress.in(view.scratch) + static_cast<int>(by);
}

/// Takes pulls, and looks one ahead: neither the counter nor the list is waited for between pulls.
class PullFeed {
 public:
  __device__ PullFeed(const RankView& view, PulledBy by, int num_passes)
      : progress_(pull_progress(view, by)),
        pulls_(view.scratch_layout.ordered_pulls_P.in(view.scratch)),
        rows_(view.scratch_layout.ordered_rows_PK.in(view.scratch)),
        top_k_(view.routing().top_k),
        num_pulls_(progress_->num_pulls),
        num_passes_(static_cast<std::uint32_t>(num_passes)) {
    take();
    look_up();
    take();
  }

  /// The warp's next pull of the pass; false when there is none.
  __device__ bool next(int pass, TakenPull& taken) {
    if (ahead_.pass != pass) return false;
    taken = ahead_;
    look_up();
    take();
    return true;
  }

 private:
  __device__ void take() {
    if (device::lane_idx() == 0) taken_ = atomicAdd(&progress_->next, 1U);
  }
  __device__ void look_up() {
    const std::uint32_t taken = __shfl_sync(0xffffffffU, taken_, 0);
    ahead_.pass = -1;
    if (taken >= num_pulls_ * num_passes_) return;
    const std::uint32_t idx = taken >= num_pulls_ ? taken - num_pulls_ : taken;
    ahead_.pass = taken >= num_pulls_ ? 1 : 0;
    ahead_.pull = pulls_[idx];
    if (device::lane_idx() < top_k_) {
      ahead_.row = rows_[static_cast<std::int64_t>(idx) * top_k_ + device::lane_idx()];
    }
  }

  PullProgress* progress_;
  const OrderedPull* pulls_;
  const std::int32_t* rows_;
  int top_k_;
  std::uint32_t num_pulls_;
  std::uint32_t num_passes_;
  std::uint32_t taken_ = 0;
  TakenPull ahead_;
};

/// One thread; a CTA barrier follows.
__device__ inline void init_pull_barriers(PullShared& shared) {
  for (std::uint64_t& arrived : shared.chunk_arrived) {
    device::init_barrier(device::shared_address(&arrived), 1);
  }
}

/// All chunks of a pull.
__device__ inline void move_row(const RankView& view, const PullParams& params,
                                const TakenPull& taken, PullRing& ring) {
  const std::int64_t hidden = view.dims.hidden_dim;
  const PullPass& pass = params.passes[taken.pass];
  const bool stores = device::lane_idx() < taken.pull.num_rows;
  const std::byte* from = view.symmetric_R[taken.pull.source] + pass.staged_offset +
                          taken.pull.token * hidden * static_cast<std::int64_t>(sizeof(bf16));
  std::byte* to =
      stores ? reinterpret_cast<std::byte*>(pass.rows_CH + taken.row * hidden) : nullptr;
  for (int vector = 0; vector < params.num_vectors; vector += params.chunk_vectors) {
    const int end = min(vector + params.chunk_vectors, params.num_vectors);
    ChunkInFlight chunk;
    chunk.num_bytes = static_cast<std::uint32_t>(end - vector) * kPullVectorBytes;
    chunk.to = stores ? to + vector * kPullVectorBytes : nullptr;
    chunk.completes_rows =
        end == params.num_vectors && taken.pass == 0 && params.by == PulledBy::product;
    if (chunk.completes_rows && stores) chunk.block = schedule::block_of_row(taken.row);
    ring.move(from + vector * kPullVectorBytes, chunk);
  }
}

__device__ inline int num_passes_now(const RankView& view, const PullParams& params) {
  const bool is_left = params.last_pass == LastPass::by_weight_gradients &&
                       pull_progress(view, PulledBy::weight_gradients)->num_pulls != 0;
  return params.num_passes - (is_left ? 1 : 0);
}

/// One warp a CTA.
__device__ inline void pull_role(const RankView& view, const PullParams& params, PullShared& shared,
                                 trace::Recorder& recorder) {
  if (view.control()->call_failed != 0) return;
  device::fence_async_global();  // what peers staged by ordinary stores, the copy engine reads
  PullRing ring(shared, view.scratch_layout.rows_arrived.in(view.scratch));
  const int num_passes = num_passes_now(view, params);
  PullFeed feed(view, params.by, num_passes);
  for (int pass = 0; pass < num_passes; ++pass) {
    std::uint32_t num_taken = 0;
    TakenPull taken;
    while (feed.next(pass, taken)) {
      const trace::Span span(recorder, trace::Event::pulls);
      ++num_taken;
      move_row(view, params, taken, ring);
    }
    const trace::Span span(recorder, trace::Event::awaits_copies);
    ring.finish();
    if (pass == 0 && device::lane_idx() == 0) {
      device::signal<device::Reach::gpu>(&pull_progress(view, params.by)->num_done, num_taken);
    }
  }
}

}  // namespace megamoe::gpu
