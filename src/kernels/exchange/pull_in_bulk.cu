// Pulling through shared memory: the copy engine reads a chunk of a token once and stores it to
// every row. Each warp has a ring of chunks of its own and loads one chunk ahead; lane i stores to
// the token's i-th row, so all lanes commit and wait in step.
#include "device/barrier.cuh"
#include "device/row_copy.cuh"
#include "kernels/exchange/pull_role.cuh"
#include "kernels/launch.h"

namespace megamoe::gpu {
namespace {

constexpr int kStages = 3;
constexpr std::uint32_t kStageBytes = kMaxChunkVectors * sizeof(Vector);
constexpr int kBulkBlocksAnSm = 2;

struct BulkShared {
  alignas(128) std::byte chunks[kMoverWarps][kStages][kStageBytes];
  std::uint64_t chunk_arrived[kMoverWarps][kStages];
};
static_assert(kBulkBlocksAnSm * sizeof(BulkShared) <= 224 * 1024, "shared memory of an SM");

/// A chunk on its way into shared memory.
struct ChunkInFlight {
  std::uint32_t num_bytes = 0;
  std::uint32_t num_rows = 0;
  Vector* to = nullptr;  ///< this lane's row
};

/// One warp's ring.
class BulkMover {
 public:
  __device__ explicit BulkMover(BulkShared& shared)
      : chunks_(device::shared_address(shared.chunks[device::warp_idx()])),
        barriers_(device::shared_address(shared.chunk_arrived[device::warp_idx()])) {
    if (device::lane_idx() == 0) {
      for (int stage = 0; stage < kStages; ++stage) {
        device::init_barrier(barrier(static_cast<std::uint32_t>(stage)), 1);
      }
      device::publish_barrier_init();
    }
    __syncwarp();
  }

  /// Begins to load, then stores the chunk before.
  __device__ void move(const Vector* from, const ChunkInFlight& chunk) {
    // Of the groups committed so far all but the last kStages - 2 have left the stages to come.
    device::wait_stores_read<kStages - 2>();
    __syncwarp();
    if (device::lane_idx() == 0) {
      device::arrive_expecting(barrier(load_.slot), chunk.num_bytes);
      device::load_bytes(chunks_ + load_.slot * kStageBytes, from, chunk.num_bytes,
                         barrier(load_.slot));
    }
    load_.advance();
    store_pending();
    pending_ = chunk;
  }

  __device__ void finish() {
    store_pending();
    device::wait_stores_complete<0>();
  }

 private:
  __device__ std::uint32_t barrier(std::uint32_t stage) const {
    return barriers_ + stage * static_cast<std::uint32_t>(sizeof(std::uint64_t));
  }

  __device__ void store_pending() {
    if (pending_.num_bytes == 0) return;
    device::wait(barrier(store_.slot), store_.parity);
    if (static_cast<std::uint32_t>(device::lane_idx()) < pending_.num_rows) {
      device::store_bytes(pending_.to, chunks_ + store_.slot * kStageBytes, pending_.num_bytes);
    }
    device::commit_stores();
    store_.advance();
    pending_ = {};
  }

  std::uint32_t chunks_;
  std::uint32_t barriers_;
  device::RingPosition<kStages> load_;
  device::RingPosition<kStages> store_;
  ChunkInFlight pending_;
};

__device__ void move_chunk(BulkMover& mover, const RowCut& cut, const PullUnit& unit,
                           const Vector* from, bf16* rows_CH, std::int64_t hidden) {
  const int begin = unit.chunk * cut.chunk_vectors;
  const int num_vectors = min(cut.chunk_vectors, cut.num_vectors - begin);
  mover.move(
      from + begin,
      {static_cast<std::uint32_t>(num_vectors) * static_cast<std::uint32_t>(sizeof(Vector)),
       static_cast<std::uint32_t>(unit.num_rows), row_of(rows_CH, unit.row, hidden) + begin});
}

__global__ __launch_bounds__(kMoverThreads, kBulkBlocksAnSm) void pull_in_bulk_kernel(
    const __grid_constant__ RankView view, std::byte* plan, const PulledRows rows,
    const RowCut cut) {
  extern __shared__ __align__(128) std::byte dynamic_shared[];
  if (view.control()->call_failed != 0) return;
  const std::int64_t hidden = view.dims.hidden_dim;
  const SymmetricLayout& layout = view.symmetric.exchange;
  BulkMover mover(*reinterpret_cast<BulkShared*>(dynamic_shared));
  device::fence_async_global();  // what peers staged by ordinary stores, the copy engine reads
  for_each_pull(view, cut.num_chunks, [&](const PullUnit& unit) {
    std::byte* base = view.symmetric_R[unit.source];
    note_rows(view, unit, rows);
    move_chunk(mover, cut, unit, row_of(layout.staged_rows_TH.in(base), unit.token, hidden),
               rows.x_CH, hidden);
    if (rows.dy_CH != nullptr) {
      move_chunk(mover, cut, unit, row_of(layout.staged_dy_TH.in(base), unit.token, hidden),
                 rows.dy_CH, hidden);
    }
  });
  mover.finish();
  clear_pads(view, plan, cut, rows);
  device::fence_async_global();
}

}  // namespace

void pull_rows_in_bulk(const RankView& view, std::byte* plan, const PulledRows& rows,
                       cudaStream_t stream) {
  constexpr int kSharedBytes = sizeof(BulkShared);
  cuda::check(cudaFuncSetAttribute(pull_in_bulk_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   kSharedBytes),
              "shared memory of pull_rows_in_bulk");
  pull_in_bulk_kernel<<<num_multiprocessors() * kBulkBlocksAnSm, kMoverThreads, kSharedBytes,
                        stream>>>(view, plan, rows, RowCut(view.dims.hidden_dim));
  check_launch("pull_rows_in_bulk");
}

void load_bulk_pull_kernel() { load_kernel(reinterpret_cast<const void*>(&pull_in_bulk_kernel)); }

}  // namespace megamoe::gpu
