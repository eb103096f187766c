// A build without CUDA.
#include "megamoe/error.h"
#include "train/cuda/cuda_backend.h"

namespace megamoe::trainer {
namespace {

[[noreturn]] void refuse() {
  throw Error(ErrorCode::unsupported,
              "backend cuda: this build has none (MEGAMOE_CUDA is off); use the cpu backend");
}

}  // namespace

void require_cuda_backend() { refuse(); }
std::unique_ptr<TrainBackend> make_cuda_backend(Communicator& /*host_group*/) { refuse(); }

}  // namespace megamoe::trainer
