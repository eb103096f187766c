// The weight gradients, beside which rows travel: x arrives under the gradients of down, which do
// not read it, and dx, which peers have sent, is reduced where it has arrived. The kernel of
// weight_gradients/kernel.cuh, whose fourth producer warp pulls and then reduces.
//
// Read next: pull_role.cuh, reduce_role.cuh.
#pragma once

#include "device/cluster_memory.cuh"
#include "kernels/forward/beside_stages.cuh"
#include "kernels/forward/pull_role.cuh"
#include "kernels/forward/reduce_role.cuh"
#include "kernels/forward/rows_late.cuh"
#include "kernels/weight_gradients/kernel.cuh"

namespace megamoe::products {

struct RowsBesideShared {
  gpu::PullShared pulls;
  gpu::ReduceShared reduction;  ///< in the chunks of the pulls
  std::uint32_t rows_late;      ///< the loads of tiles that need x brought anything
  std::uint32_t call_failed;    ///< before this kernel
};
static_assert(gpu::kReduceBuffers * gpu::kReduceBufferBytes <= sizeof(gpu::PullShared::chunks));

/// Waits, before the first tile that needs x, until all of it is there.
class ArrivedX {
 public:
  __device__ ArrivedX(const gpu::RankView& view, const gpu::PullParams& pulls,
                      std::uint32_t& rows_late)
      : view_(view),
        progress_(gpu::pull_progress(view, PulledBy::weight_gradients)),
        rows_late_(rows_late),
        is_in_place_(pulls.num_passes == 0) {}

  __device__ void await(trace::Recorder& recorder) {
    if (is_in_place_) return;
    const trace::Span span(recorder, trace::Event::awaits_rows);
    is_in_place_ = true;
    const std::uint32_t expected = progress_->num_pulls;
    const auto num_done = [&] { return device::acquire<device::Reach::gpu>(&progress_->num_done); };
    if (!gpu::await_rows(view_, gpu::Wait::later, 0, expected, num_done)) note_late();
    device::fence_async_global();
  }

 private:
  /// In both CTAs: what this one loads from now on goes to the other, too, whose own wait may yet
  /// have been in time.
  __device__ void note_late() const {
    for (std::uint32_t cta = 0; cta < kClusterSize; ++cta) {
      device::store_cluster_word(device::cluster_address(device::shared_address(&rows_late_), cta),
                                 1);
    }
  }

  const gpu::RankView& view_;
  const PullProgress* progress_;
  std::uint32_t& rows_late_;
  bool is_in_place_;
};

template <>
inline constexpr std::uint32_t kBesideStages<TogetherStorage> =
    kBehind<offsetof(TogetherStorage, groups) + sizeof(GradientGroups)>;
template <>
inline constexpr std::uint32_t kBesideStages<TurnStorage> =
    kBehind<offsetof(TurnStorage, groups) + sizeof(GradientGroups)>;

template <Shared kShared, GradientType kType>
__global__ void __cluster_dims__(kClusterSize, 1, 1) __launch_bounds__(kNumThreads, 1)
    weight_gradients_beside_rows_kernel(const __grid_constant__ WeightGradientParams params,
                                        const __grid_constant__ gpu::RankView view,
                                        const __grid_constant__ gpu::PullParams pull_params,
                                        const __grid_constant__ gpu::ReduceTargets targets) {
  extern __shared__ __align__(1024) std::uint8_t shared_bytes[];
  using Storage = GradientStorage<kType>;
  Storage& shared = *reinterpret_cast<Storage*>(shared_bytes);
  RowsBesideShared& beside = beside_stages<Storage, RowsBesideShared>(shared_bytes);
  const trace::Block block(params.trace_region);
  const int warp = device::warp_idx();
  const int cta_rank = static_cast<int>(device::cluster_cta_rank());

  if (warp == 0 && device::elect_one()) {
    gpu::init_pull_barriers(beside.pulls);
    gpu::init_reduce_barriers(beside.reduction);
    beside.rows_late = 0;
    beside.call_failed = view.control()->call_failed;
    init_gradient_barriers(shared);
  }
  if (warp == 1) list_groups(params, shared.groups);
  __syncthreads();
  device::cluster_sync();
  // One answer for both CTAs: another cluster may be failing the call.
  if (device::load_cluster_word(
          device::cluster_address(device::shared_address(&beside.call_failed), 0)) != 0) {
    device::cluster_sync();
    return;
  }

  if (warp < static_cast<int>(kWarpsPerWarpgroup)) {
    device::release_registers_to<kProducerRegisters>();
    if (warp == static_cast<int>(ProducerWarp::loads)) {
      if (device::elect_one()) {
        ArrivedX x(view, pull_params, beside.rows_late);
        gradient_load_role<kShared, kType>(
            params, shared, cta_rank, [&](const GradientTile& tile, trace::Recorder& recorder) {
              if (tile.job >= params.num_early_jobs) x.await(recorder);
            });
        gpu::note_loads_done(beside.reduction);
      }
    } else if (warp == static_cast<int>(ProducerWarp::pulls)) {
      trace::Recorder recorder(params.trace_region, trace::track_warp_3, device::lane_idx());
      if (pull_params.num_passes > 0) gpu::pull_role(view, pull_params, beside.pulls, recorder);
      if (targets.num_tokens > 0) {
        gpu::reduce_role(view, targets, &beside.pulls.chunks[0][0], beside.reduction, recorder);
      }
    } else {
      if (device::elect_one()) {
        const volatile std::uint32_t& rows_late = beside.rows_late;
        gradient_store_role<kShared, kType>(params, shared, cta_rank,
                                            warp - static_cast<int>(ProducerWarp::stores_slot_0),
                                            [&](const GradientTile&) { return rows_late == 0; });
      }
    }
    __syncwarp();
  } else {
    device::claim_registers_up_to<kMathRegisters>();
    gradient_math_role<kShared, kType>(params, shared, cta_rank,
                                       warp / static_cast<int>(kWarpsPerWarpgroup) - 1);
  }
  // Neither CTA may leave while the other still signals its barriers or multicasts into its stages.
  device::cluster_sync();
}

}  // namespace megamoe::products
