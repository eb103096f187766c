#include "train/cuda/cuda_backend.h"

#include "megamoe/cuda.h"
#include "train/cuda/cuda_block_router.h"
#include "train/cuda/cuda_operations.h"
#include "train/cuda/runtime.h"

namespace megamoe::trainer {
namespace cuda {
namespace {

int device_of(int rank, int num_ranks) { return num_cuda_devices() >= num_ranks ? rank : 0; }

class CudaBackend final : public TrainBackend {
 public:
  explicit CudaBackend(Communicator& host_group)
      : host_group_(host_group),
        current_(device_of(host_group.rank(), host_group.size())),
        group_(make_cuda_communicator(host_group, device_of(host_group.rank(), host_group.size()))),
        operations_(stream_.get()) {}

  [[nodiscard]] Communicator& host_group() override { return host_group_; }
  [[nodiscard]] Communicator& group() override { return *group_; }
  [[nodiscard]] Stream stream() override { return {stream_.get()}; }
  [[nodiscard]] Operations& operations() override { return operations_; }
  std::unique_ptr<BlockRouter> make_router(const BlockRouterShape& shape) override {
    return std::make_unique<CudaBlockRouter>(shape, *this);
  }
  std::shared_ptr<std::byte> allocate(std::size_t bytes) override {
    return cuda::allocate(bytes, stream_.get());
  }
  void upload(void* to, const void* host, std::size_t bytes) override {
    if (bytes == 0) return;
    // From memory that is not pinned: the runtime has read the source when it returns.
    check(cudaMemcpyAsync(to, host, bytes, cudaMemcpyHostToDevice, stream_.get()), "an upload");
  }
  void download(void* host, const void* from, std::size_t bytes) override {
    if (bytes == 0) return;
    check(cudaMemcpyAsync(host, from, bytes, cudaMemcpyDeviceToHost, stream_.get()), "a download");
    wait();
  }
  void wait() override { check(cudaStreamSynchronize(stream_.get()), "a step's kernels"); }

 private:
  Communicator& host_group_;
  CurrentDevice current_;  // while the backend lives, on the thread that made it
  std::unique_ptr<Communicator> group_;
  OwnedStream stream_;
  CudaOperations operations_;
};

}  // namespace
}  // namespace cuda

void require_cuda_backend() {
  if (num_cuda_devices() == 0) {
    throw Error(ErrorCode::unsupported,
                "backend cuda: no CUDA device can be used (`megamoe info` says why); use the cpu "
                "backend");
  }
  if (!tools::why_no_cublas().empty()) {
    throw Error(ErrorCode::unsupported, "backend cuda: " + tools::why_no_cublas());
  }
}

std::unique_ptr<TrainBackend> make_cuda_backend(Communicator& host_group) {
  return std::make_unique<cuda::CudaBackend>(host_group);
}

}  // namespace megamoe::trainer
