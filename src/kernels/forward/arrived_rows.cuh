// The load role of a product whose rows are still being pulled: a tile's first load waits until
// every block of 64 rows that it reads is in place.
#pragma once

#include <cstdint>

#include "device/flags.cuh"
#include "device/row_copy.cuh"
#include "kernels/forward/rows_late.cuh"
#include "kernels/products/load_role.cuh"
#include "kernels/rank_view.h"
#include "schedule/row_blocks.h"

namespace megamoe::products {

/// One thread's view of the counters. An acquiring load takes about as long as the ring covers, so
/// four of them in a row before a tile's first load would be felt at every tile. Hence blocks of
/// the next tile are looked at while this tile's stages are filled, a load a stage, four counters a
/// load; and once all pulls are done, nothing is looked at any more.
class ArrivedRows {
 public:
  __device__ explicit ArrivedRows(const gpu::RankView& view)
      : view_(view),
        rows_arrived_(view.scratch_layout.rows_arrived.in(view.scratch)),
        progress_(view.scratch_layout.pull_progress.in(view.scratch) +
                  static_cast<int>(PulledBy::product)) {}

  /// Look number `look` of kLooks at the next tile's blocks.
  static constexpr int kLooks = 3;
  __device__ void look_ahead(const schedule::BlockRange& next, int look) {
    if (all_in_place_) return;
    if (look == kLooks - 1) {
      all_in_place_ =
          device::acquire<device::Reach::gpu>(&progress_->num_done) == progress_->num_pulls;
      return;
    }
    // A tile touches at most four blocks, so at most two aligned groups of four.
    const int first = next.first / kGroup * kGroup + look * kGroup;
    if (first >= next.first + next.count) return;
    std::uint32_t counters[kGroup];
    device::acquire_four(rows_arrived_ + first, counters);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      const int block = first + i - next.first;
      if (block >= 0 && block < next.count && counters[i] >= schedule::kRowsPerBlock) {
        in_place_ |= 1U << block;
      }
    }
  }

  /// Waits for the blocks that look_ahead() has not seen complete; then the copy engine may read
  /// them. On a missed deadline the call fails and all loads fall through: what they bring is never
  /// used.
  __device__ void await(const schedule::BlockRange& blocks, trace::Recorder& recorder) {
    if (all_fenced_) return;
    const trace::Span span(recorder, trace::Event::awaits_rows);
    for (int i = 0; i < blocks.count; ++i) {
      if (!all_in_place_ && (in_place_ >> i & 1U) == 0) await_block(blocks.first + i);
    }
    in_place_ = 0;
    is_first_tile_ = false;
    device::fence_async_global();
    all_fenced_ = all_in_place_;
  }

 private:
  static constexpr int kGroup = 4;

  __device__ void await_block(int block) const {
    gpu::await_rows(view_, is_first_tile_ ? gpu::Wait::start : gpu::Wait::later,
                    block * schedule::kRowsPerBlock, schedule::kRowsPerBlock,
                    [&] { return device::acquire<device::Reach::gpu>(rows_arrived_ + block); });
  }

  const gpu::RankView& view_;
  const std::uint32_t* rows_arrived_;
  const PullProgress* progress_;
  bool all_in_place_ = false;
  bool all_fenced_ = false;
  bool is_first_tile_ = true;
  std::uint32_t in_place_ = 0;  ///< bit i: block i of the next tile was seen complete
};

/// load_role, but for the waiting. `next` is shared memory of this thread's own: in registers the
/// next tile beside the present one would spill.
template <RowProduct kProduct, Shared kShared>
__device__ inline void load_arrived_role(const gpu::RankView& view, const RowProductParams& params,
                                         SharedStorage& shared, GroupedTile& next, int cta_rank) {
  GroupedWalk<kShared> walk(params.rows, params.num_channel_tiles, shared.first_tile, cta_rank);
  ArrivedRows arrived(view);
  trace::Recorder recorder(params.trace_region, trace::track_warp_0, 0);
  StageRing ring;
  GroupedTile tile;
  bool has_next = walk.next(tile);
  while (has_next) {
    arrived.await(schedule::blocks_of_cta<kShared>(tile, cta_rank), recorder);
    const trace::Span span(recorder, trace::Event::loads, tile.group, tile.num_units);
    GroupedTile after;
    has_next = walk.next(after);
    if (has_next) next = after;
    for (int k_block = 0; k_block < params.num_k_blocks; ++k_block) {
      load_stage<kProduct, kShared>(params, shared, tile, k_block, cta_rank, ring, recorder);
      if (has_next && k_block < ArrivedRows::kLooks) {
        arrived.look_ahead(schedule::blocks_of_cta<kShared>(next, cta_rank), k_block);
      }
    }
    tile = next;
  }
}

}  // namespace megamoe::products
