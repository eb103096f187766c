// Which tokens cross and which slots come back, by groups of experts: a stable partition of numbers
// 0, 1, ... by a key, a CTA a group. Each CTA first counts what lies before its group.
#include "device/cluster.cuh"
#include "kernels/hosts/hosts.h"
#include "kernels/launch.h"
#include "kernels/plan/scan_threads.cuh"

namespace megamoe::gpu {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / device::kWarpSize;
/// Neighbouring numbers of a thread in each round.
constexpr int kNumbers = 4;
constexpr std::int32_t kNowhere = -1;

/// The group of an expert, where it is one and on the host.
__device__ std::int32_t group_on_host(const HostRouting& routing, std::int32_t host,
                                      std::int32_t expert) {
  if (expert < 0 || expert >= routing.dims.num_experts) return kNowhere;
  return routing.host_of_expert(expert) == host ? routing.group_of_expert(expert) : kNowhere;
}

/// Token -> the first group that needs it.
struct TokenKey {
  HostRouting routing;
  const std::int32_t* ids_TK;
  std::int32_t host;

  __device__ std::int32_t operator()(std::int32_t token) const {
    const std::int32_t top_k = routing.dims.top_k;
    std::int32_t first = kNowhere;
    for (std::int32_t slot = 0; slot < top_k; ++slot) {
      const std::int32_t group =
          group_on_host(routing, host, ids_TK[static_cast<std::int64_t>(token) * top_k + slot]);
      if (group != kNowhere && (first == kNowhere || group < first)) first = group;
    }
    return first;
  }
};

/// Slot -> the group of its expert.
struct SlotKey {
  HostRouting routing;
  const std::int32_t* ids_TK;
  std::int32_t host;

  __device__ std::int32_t operator()(std::int32_t slot) const {
    return group_on_host(routing, host, ids_TK[slot]);
  }
};

struct ListShared {
  std::int32_t warp_counts[kWarps];
};

/// The sum of `count` over the threads before this one, and over all.
struct Prefix {
  std::int32_t before;
  std::int32_t total;
};
__device__ Prefix prefix_of(ListShared& shared, std::int32_t count) {
  const int lane = device::lane_idx();
  const int warp_idx = device::warp_idx();  // by all lanes
  const std::int32_t sum = sum_up_to_lane(count);
  if (lane == device::kWarpSize - 1) shared.warp_counts[warp_idx] = sum;
  __syncthreads();
  Prefix prefix{sum - count, 0};
  for (int warp = 0; warp < kWarps; ++warp) {
    if (warp < warp_idx) prefix.before += shared.warp_counts[warp];
    prefix.total += shared.warp_counts[warp];
  }
  __syncthreads();
  return prefix;
}

/// blockIdx.x is the group. `counts_G` may be null.
template <class Key>
__global__ __launch_bounds__(kThreads) void list_kernel(const Key key, const std::int32_t size,
                                                        std::int32_t* list,
                                                        std::int32_t* counts_G) {
  __shared__ ListShared shared;
  const auto group = static_cast<std::int32_t>(blockIdx.x);
  std::int32_t num_before = 0;
  for (std::int32_t i = static_cast<std::int32_t>(threadIdx.x); group > 0 && i < size;
       i += kThreads) {
    const std::int32_t other = key(i);
    if (other != kNowhere && other < group) ++num_before;
  }
  std::int32_t next = prefix_of(shared, num_before).total;
  const std::int32_t begin = next;
  for (std::int32_t first = 0; first < size; first += kThreads * kNumbers) {
    const std::int32_t mine = first + static_cast<std::int32_t>(threadIdx.x) * kNumbers;
    bool takes[kNumbers];
    std::int32_t count = 0;
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) {
      takes[i] = mine + i < size && key(mine + i) == group;
      count += takes[i] ? 1 : 0;
    }
    const Prefix prefix = prefix_of(shared, count);
    std::int32_t place = next + prefix.before;
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) {
      if (takes[i]) list[place++] = mine + i;
    }
    next += prefix.total;
  }
  if (threadIdx.x == 0 && counts_G != nullptr) counts_G[group] = next - begin;
}

template <class Key>
void launch(const Key& key, std::int64_t size, std::int32_t* list, std::int32_t* counts_G,
            const char* what, cudaStream_t stream) {
  list_kernel<Key><<<static_cast<unsigned>(key.routing.num_groups), kThreads, 0, stream>>>(
      key, static_cast<std::int32_t>(size), list, counts_G);
  check_launch(what);
}

}  // namespace

void list_tokens(const HostRouting& routing, const IdsOfHost& ids, std::int32_t* tokens,
                 std::int32_t* counts_G, cudaStream_t stream) {
  launch(TokenKey{routing, ids.ids_TK, ids.host}, ids.num_tokens, tokens, counts_G, "list_tokens",
         stream);
}

void list_slots(const HostRouting& routing, const IdsOfHost& ids, std::int32_t* slots,
                cudaStream_t stream) {
  launch(SlotKey{routing, ids.ids_TK, ids.host}, ids.num_tokens * routing.dims.top_k, slots,
         nullptr, "list_slots", stream);
}

void load_lists_of_hosts_kernels() {
  load_kernel(reinterpret_cast<const void*>(&list_kernel<TokenKey>));
  load_kernel(reinterpret_cast<const void*>(&list_kernel<SlotKey>));
}

}  // namespace megamoe::gpu
