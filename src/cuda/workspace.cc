#include "cuda/workspace.h"

#include <string>

#include "comm/gpu_workspace_layout.h"
#include "kernels/exchange/exchange.h"
#include "kernels/forward/forward.h"
#include "kernels/hosts/hosts.h"
#include "kernels/plan/plan.h"
#include "kernels/products/products.h"

namespace megamoe::cuda {
namespace {

int device_of(const Communicator& communicator) {
  if (communicator.device() == Communicator::kHostMemory) {
    throw Error(ErrorCode::invalid_argument,
                "backend cuda: the communicator's memory is the host's; make one with "
                "make_cuda_communicator()");
  }
  return communicator.device();
}

std::shared_ptr<RankCalls> calls_of(const Communicator& communicator, int device) {
  const auto* ordered = dynamic_cast<const OrderedCommunicator*>(&communicator);
  if (ordered != nullptr) return ordered->calls();
  const CurrentDevice current(device);
  return std::make_shared<RankCalls>(device, communicator);
}

}  // namespace

CudaWorkspace::CudaWorkspace(const LayerConfig& config, Workspace::Impl& workspace)
    : device(device_of(workspace.communicator)),
      local(device, workspace.bytes.local, "the row buffers of a workspace"),
      calls(calls_of(workspace.communicator, device)),
      side(device, SideStream::Priority::before_others),
      gradients_side(device, SideStream::Priority::as_others),
      workspace_(workspace) {
  const CurrentDevice current(device);
  const WorkspaceDims dims = workspace_dims(config, workspace.communicator.size());
  scratch_offset_ = gpu_local_layout(dims).scratch.block_rows_BE.offset;
  exchange_offset_ = gpu_symmetric_layout(dims).exchange.staged_rows_TH.offset;
  gpu::load_exchange_kernels();
  products::load_product_kernels();
  gpu::load_overlap_kernels();
  if (workspace.communicator.topology().num_hosts() > 1) {
    gpu::load_hosts_kernels();
    network_failure = std::make_unique<PinnedValue<device::FailureRecord>>();
  }
  gpu::RankView view = gpu::make_rank_view(dims, workspace.communicator.rank());
  view.scratch = local.data();
  const OwnedStream stream;
  gpu::reset_control(view, stream.get());
  check(cudaStreamSynchronize(stream.get()), "the first kernel of a workspace");
}

CudaWorkspace::~CudaWorkspace() {
  const CurrentDevice current(device);
  calls->order.synchronize();
}

void CudaWorkspace::check_device(cudaStream_t stream) const {
  // The runtime does not tell the device of a stream that is being captured.
  if (is_capturing(stream)) return;
  int of_stream = 0;
  check(cudaStreamGetDevice(stream, &of_stream), "the device of the stream");
  if (of_stream != device) {
    throw Error(ErrorCode::invalid_argument, "stream is of device " + std::to_string(of_stream) +
                                                 "; the layer's rank is on device " +
                                                 std::to_string(device));
  }
}

void CudaWorkspace::check_fork(cudaStream_t stream) const {
  if (!side.can_fork_from(stream)) {
    throw Error(ErrorCode::invalid_argument,
                "stream: a capture of another call on this workspace has not ended");
  }
}

void CudaWorkspace::poison() {
  const CurrentDevice current(device);
  calls->order.synchronize();
  constexpr int kNan = 0xff;  // a NaN in bf16, fp32 and fp64; -1 as an integer
  std::byte* symmetric = workspace_.symmetric->peer(workspace_.communicator.rank());
  const OwnedStream stream;
  check(cudaMemsetAsync(symmetric + exchange_offset_, kNan,
                        workspace_.bytes.symmetric - exchange_offset_, stream.get()),
        "poison");
  check(cudaMemsetAsync(local.data() + scratch_offset_, kNan,
                        workspace_.bytes.local - scratch_offset_, stream.get()),
        "poison");
  check(cudaStreamSynchronize(stream.get()), "poison");
}

}  // namespace megamoe::cuda
