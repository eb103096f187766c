#include "train/backend.h"

#include "train/cpu/cpu_backend.h"
#include "train/cuda/cuda_backend.h"

namespace megamoe::trainer {

void require_backend(Backend backend) {
  if (backend == Backend::cuda) require_cuda_backend();
}

std::unique_ptr<TrainBackend> make_backend(const TrainOptions& options, Communicator& host_group) {
  return options.backend == Backend::cuda ? make_cuda_backend(options, host_group)
                                          : make_cpu_backend(host_group);
}

}  // namespace megamoe::trainer
