// NCCL 2.28 tells the addresses to device code only.
#include <nccl_device.h>

#include "comm/cuda/lsa_pointers.h"
#include "cuda/runtime.h"

namespace megamoe::nccl {
namespace {

__global__ void read_pointers(ncclWindow_t window, int num_ranks, void** pointers_R) {
  for (int rank = 0; rank < num_ranks; ++rank) {
    pointers_R[rank] = ncclGetLsaPointer(window, 0, rank);
  }
}

}  // namespace

std::vector<std::byte*> lsa_pointers(ncclWindow_t window, int num_ranks) {
  const std::size_t bytes = num_ranks * sizeof(void*);
  int device = 0;
  cuda::check(cudaGetDevice(&device), "cudaGetDevice");
  const cuda::DeviceMemory on_device(device, static_cast<std::int64_t>(bytes), "window addresses");
  const cuda::OwnedStream stream;
  read_pointers<<<1, 1, 0, stream.get()>>>(window, num_ranks,
                                           reinterpret_cast<void**>(on_device.data()));
  std::vector<std::byte*> pointers(num_ranks);
  cudaMemcpyAsync(pointers.data(), on_device.data(), bytes, cudaMemcpyDeviceToHost, stream.get());
  cuda::check(cudaStreamSynchronize(stream.get()), "reading a window's addresses");
  return pointers;
}

}  // namespace megamoe::nccl
