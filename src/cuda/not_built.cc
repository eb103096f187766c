// The CUDA backend of a build that has none.
#include "cuda/entry.h"
#include "layer/backend.h"
#include "megamoe/cuda.h"

namespace megamoe {
namespace {

[[noreturn]] void refuse() {
  throw Error(ErrorCode::unsupported,
              "backend cuda: this build has none (MEGAMOE_CUDA is off); use the cpu backend");
}

}  // namespace

int num_cuda_devices() { return 0; }

std::unique_ptr<Communicator> make_cuda_communicator(Communicator& /*group*/, int /*device*/) {
  refuse();
}

namespace cuda {

bool is_built() { return false; }

std::unique_ptr<WorkspaceMemory> make_workspace_memory(const LayerConfig& /*config*/,
                                                       Workspace::Impl& /*workspace*/) {
  refuse();
}

std::unique_ptr<LayerBackend> make_backend(const LayerConfig& /*config*/,
                                           Workspace::Impl& /*workspace*/) {
  refuse();
}

}  // namespace cuda
}  // namespace megamoe
