// The CUDA backend of a build that has none.
#include "cuda/entry.h"
#include "layer/backend.h"
#include "megamoe/cuda.h"
#include "megamoe/cuda_router.h"
#include "routing/cuda_router_check.h"

namespace megamoe {
namespace {

[[noreturn]] void refuse() {
  throw Error(ErrorCode::unsupported,
              "backend cuda: this build has none (MEGAMOE_CUDA is off); use the cpu backend");
}

}  // namespace

int num_cuda_devices() { return 0; }

std::unique_ptr<Communicator> make_cuda_communicator(Communicator& /*group*/, int /*device*/,
                                                     const CudaHostsOptions& /*hosts*/) {
  refuse();
}

struct CudaRouter::Impl {};

CudaRouter::CudaRouter(const RouterConfig& config, int /*device*/) {
  detail::check_cuda_router_config(config);
  refuse();
}
CudaRouter::CudaRouter(CudaRouter&&) noexcept = default;
CudaRouter& CudaRouter::operator=(CudaRouter&&) noexcept = default;
CudaRouter::~CudaRouter() = default;

// There is no router to call these on.
const RouterConfig& CudaRouter::config() const { refuse(); }
void CudaRouter::forward(const RouterInputs& /*inputs*/, const RouterOutputs& /*outputs*/,
                         Stream /*stream*/) {
  refuse();
}
void CudaRouter::add_load(const ConstTensorView& /*logits*/, const ConstTensorView& /*expert_ids*/,
                          const TensorView& /*load*/, Stream /*stream*/) {
  refuse();
}
void CudaRouter::aux_loss(const ConstTensorView& /*global_load*/, const TensorView& /*loss*/,
                          Stream /*stream*/) {
  refuse();
}
void CudaRouter::backward(const CudaRouterBackwardInputs& /*inputs*/,
                          const TensorView& /*d_logits*/, Stream /*stream*/) {
  refuse();
}
void CudaRouter::update_selection_bias(const ConstTensorView& /*global_load*/, float /*rate*/,
                                       const TensorView& /*selection_bias*/, Stream /*stream*/) {
  refuse();
}
void CudaRouter::check(Stream /*stream*/) { refuse(); }

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
