#include "verify/device_copies.h"

#include <map>

#include "cuda/runtime.h"
#include "megamoe/cuda.h"

namespace megamoe::verify {
namespace {

using cuda::check;
using cuda::CurrentDevice;

/// From the first element to behind the last.
std::size_t extent_bytes(const ConstTensorView& tensor) {
  std::int64_t extent = 1;
  for (int dim = 0; dim < tensor.num_dims; ++dim) {
    if (tensor.sizes[dim] == 0) return 0;
    extent += (tensor.sizes[dim] - 1) * tensor.strides[dim];
  }
  return static_cast<std::size_t>(extent * dtype_bytes(tensor.dtype));
}

}  // namespace

struct DeviceCopies::Impl {
  struct Copy {
    void* memory = nullptr;
    std::size_t bytes = 0;
  };

  explicit Impl(int device_idx) : device(device_idx) {
    const CurrentDevice current(device);
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
    // Freed memory stays in the pool: giving it back to the device would wait for its kernels.
    cudaMemPool_t pool = nullptr;
    check(cudaDeviceGetDefaultMemPool(&pool, device), "the device's memory pool");
    std::uint64_t keep = ~std::uint64_t{0};
    check(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &keep), "the memory pool");
  }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;
  ~Impl() {
    const CurrentDevice current(device);
    for (const auto& entry : copies) cudaFreeAsync(entry.second.memory, stream);
    cudaStreamSynchronize(stream);
    cudaStreamDestroy(stream);
  }

  void* upload(const ConstTensorView& host) {
    const CurrentDevice current(device);
    Copy& copy = copies[host.data];
    const std::size_t bytes = extent_bytes(host);
    if (bytes > copy.bytes) {
      if (copy.memory != nullptr) check(cudaFreeAsync(copy.memory, stream), "cudaFreeAsync");
      copy = {};
      check(cudaMallocAsync(&copy.memory, bytes, stream),
            "a device copy of " + std::to_string(bytes) + " bytes");
      copy.bytes = bytes;
    }
    if (bytes != 0) {
      check(cudaMemcpyAsync(copy.memory, host.data, bytes, cudaMemcpyHostToDevice, stream),
            "upload");
      check(cudaStreamSynchronize(stream), "upload");
    }
    return copy.memory;
  }

  int device;
  cudaStream_t stream = nullptr;
  std::map<const void*, Copy> copies;
};

int cuda_device_of(int rank, int num_ranks) { return num_cuda_devices() >= num_ranks ? rank : 0; }

DeviceCopies::DeviceCopies(int device) : impl_(std::make_unique<Impl>(device)) {}
DeviceCopies::~DeviceCopies() = default;

ConstTensorView DeviceCopies::upload(const ConstTensorView& host) {
  ConstTensorView copy = host;
  if (!host.absent()) copy.data = impl_->upload(host);
  return copy;
}

TensorView DeviceCopies::upload(const TensorView& host) {
  TensorView copy = host;
  if (!host.absent()) copy.data = impl_->upload(host);
  return copy;
}

void DeviceCopies::download(const TensorView& host) {
  const std::size_t bytes = extent_bytes(host);
  if (host.absent() || bytes == 0) return;
  const CurrentDevice current(impl_->device);
  check(cudaMemcpyAsync(host.data, impl_->copies.at(host.data).memory, bytes,
                        cudaMemcpyDeviceToHost, impl_->stream),
        "download");
  check(cudaStreamSynchronize(impl_->stream), "download");
}

Stream DeviceCopies::stream() const { return {impl_->stream}; }

}  // namespace megamoe::verify
