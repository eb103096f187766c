#include "train/backend.h"

#include "train/cpu/cpu_backend.h"
#include "train/cuda/cuda_backend.h"

namespace megamoe::trainer {

void require_backend(Backend backend) {
  if (backend == Backend::cuda) require_cuda_backend();
}

std::unique_ptr<TrainBackend> make_backend(Backend backend, Communicator& host_group) {
  return backend == Backend::cuda ? make_cuda_backend(host_group) : make_cpu_backend(host_group);
}

}  // namespace megamoe::trainer
