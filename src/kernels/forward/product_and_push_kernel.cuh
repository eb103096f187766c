// down, and dx of the backward pass, whose rows leave for their sources at once: the kernel of
// products/row_product_kernel.cuh with three warps that push in place of two that store.
//
// Read next: push_role.cuh.
#pragma once

#include "device/cluster_memory.cuh"
#include "kernels/forward/beside_stages.cuh"
#include "kernels/forward/push_role.cuh"
#include "kernels/products/row_product_kernel.cuh"

namespace megamoe::products {

/// down takes its tiles from a counter. dx takes every n-th: from a counter it was 1 to 2% faster
/// at qwen3-30b and qwen3-235b, and 4% slower at deepseek-v3 (docs/perf_log.md, section 24).
template <RowProduct kProduct>
inline constexpr bool kFromCounter = kProduct == RowProduct::down;

template <RowProduct kProduct>
__device__ inline auto tickets_to_read(TicketRing& ring) {
  if constexpr (kFromCounter<kProduct>) {
    return TicketReader<Readers::warp>(ring);
  } else {
    return EveryNthTile();
  }
}
template <RowProduct kProduct>
__device__ inline auto tickets_to_deal(TicketRing& ring, const gpu::RankView& view) {
  if constexpr (kFromCounter<kProduct>) {
    return TicketDealer(ring, view.num_tiles_taken(device::ProductKind::down));
  } else {
    return EveryNthTile();
  }
}

template <RowProduct kProduct, Shared kShared>
__global__ void __cluster_dims__(kClusterSize, 1, 1) __launch_bounds__(kNumThreads, 1)
    product_and_push_kernel(const __grid_constant__ RowProductParams params,
                            const __grid_constant__ gpu::RankView view, const RowOrigin* origin_C) {
  extern __shared__ __align__(1024) std::uint8_t shared_bytes[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
  PushShared& push_shared = beside_stages<SharedStorage, PushShared>(shared_bytes);
  const trace::Block block(params.trace_region);
  const int warp = device::warp_idx();
  const int cta_rank = static_cast<int>(device::cluster_cta_rank());

  if (warp == 0 && device::elect_one()) {
    push_shared.call_failed = view.control()->call_failed;
    if constexpr (kFromCounter<kProduct>) {
      init_ticket_barriers(push_shared.tickets, kPushTicketReaders);
    }
    init_barriers(shared.barriers, kNumPushWarps);
  }
  if (warp == 1) count_tiles<kShared>(params.rows, params.num_channel_tiles, shared.first_tile);
  __syncthreads();
  device::cluster_sync();
  // A call may have failed after its groups were laid out: then there is nothing to do. One answer
  // for both CTAs: what runs beside dx may be failing the call.
  if (device::load_cluster_word(
          device::cluster_address(device::shared_address(&push_shared.call_failed), 0)) != 0) {
    device::cluster_sync();
    return;
  }

  if (warp < static_cast<int>(kWarpsPerWarpgroup)) {
    device::release_registers_to<kProducerRegisters>();
    if (warp == static_cast<int>(ProducerWarp::loads)) {
      if (device::elect_one()) {
        load_role<kProduct, kShared>(params, shared, cta_rank,
                                     tickets_to_deal<kProduct>(push_shared.tickets, view));
      }
    } else {
      push_role<kProduct, kShared>(view, origin_C, params, shared, push_shared, cta_rank,
                                   warp - static_cast<int>(ProducerWarp::stores_slot_0),
                                   tickets_to_read<kProduct>(push_shared.tickets));
    }
    __syncwarp();
  } else {
    device::claim_registers_up_to<kMathRegisters>();
    math_role<kProduct, kShared, NoActivation>(params, {}, shared, cta_rank,
                                               warp / static_cast<int>(kWarpsPerWarpgroup) - 1,
                                               tickets_to_read<kProduct>(push_shared.tickets));
  }
  // Neither CTA may leave while the other still signals its barriers or multicasts into its stages.
  device::cluster_sync();
}

}  // namespace megamoe::products
