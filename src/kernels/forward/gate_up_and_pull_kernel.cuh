// gate_up on rows that its own pull warps fetch: the kernel of products/row_product_kernel.cuh with
// a load role that waits for rows, and the fourth producer warp pulling.
//
// Read next: pull_role.cuh, arrived_rows.cuh.
#pragma once

#include "kernels/forward/arrived_rows.cuh"
#include "kernels/forward/beside_stages.cuh"
#include "kernels/forward/pull_role.cuh"
#include "kernels/products/row_product_kernel.cuh"

namespace megamoe::products {

template <RowProduct kProduct, Shared kShared, class Activation>
__global__ void __cluster_dims__(kClusterSize, 1, 1) __launch_bounds__(kNumThreads, 1)
    gate_up_and_pull_kernel(const __grid_constant__ RowProductParams params,
                            const __grid_constant__ Activation activation,
                            const __grid_constant__ gpu::RankView view,
                            const __grid_constant__ gpu::PullParams pull_params) {
  static_assert(kIsGateUp<kProduct> || kIsUngatedUp<kProduct>);
  extern __shared__ __align__(1024) std::uint8_t shared_bytes[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
  gpu::PullShared& pull_shared = beside_stages<SharedStorage, gpu::PullShared>(shared_bytes);
  const trace::Block block(params.trace_region);
  const int warp = device::warp_idx();
  const int cta_rank = static_cast<int>(device::cluster_cta_rank());

  if (warp == 0 && device::elect_one()) {
    gpu::init_pull_barriers(pull_shared);
    init_barriers(shared.barriers);
  }
  if (warp == 1) count_tiles<kShared>(params.rows, params.num_channel_tiles, shared.first_tile);
  __syncthreads();
  device::cluster_sync();

  if (warp < static_cast<int>(kWarpsPerWarpgroup)) {
    device::release_registers_to<kProducerRegisters>();
    if (warp == static_cast<int>(ProducerWarp::loads)) {
      if (device::elect_one()) {
        load_arrived_role<kProduct, kShared>(view, params, shared, pull_shared.next_tile, cta_rank);
      }
    } else if (warp == static_cast<int>(ProducerWarp::pulls)) {
      trace::Recorder recorder(params.trace_region, trace::track_warp_3, device::lane_idx());
      gpu::pull_role(view, pull_params, pull_shared, recorder);
    } else {
      if (device::elect_one()) {
        store_role<kProduct, kShared>(params, shared, cta_rank,
                                      warp - static_cast<int>(ProducerWarp::stores_slot_0));
      }
    }
    __syncwarp();
  } else {
    device::claim_registers_up_to<kMathRegisters>();
    math_role<kProduct, kShared, Activation>(params, activation, shared, cta_rank,
                                             warp / static_cast<int>(kWarpsPerWarpgroup) - 1);
  }
  // Neither CTA may leave while the other still signals its barriers or multicasts into its stages.
  device::cluster_sync();
}

}  // namespace megamoe::products
