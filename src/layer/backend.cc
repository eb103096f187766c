#include "layer/backend.h"

#include "comm/gpu_hosts_layout.h"
#include "comm/relay_layout.h"
#include "cpu/backend.h"
#include "cpu/workspace.h"
#include "cuda/entry.h"

namespace megamoe {

WorkspaceBytes backend_bytes(Backend backend, const WorkspaceDims& dims, int num_hosts) {
  if (backend == Backend::cuda) {
    return {gpu_symmetric_bytes(dims, num_hosts), gpu_local_bytes(dims, num_hosts)};
  }
  return {symmetric_part_begin(dims, num_hosts),
          relay_layout(dims, num_hosts, local_layout(dims).bytes).bytes};
}

std::unique_ptr<WorkspaceMemory> make_workspace_memory(const LayerConfig& config,
                                                       Workspace::Impl& workspace) {
  if (config.backend == Backend::cuda) return cuda::make_workspace_memory(config, workspace);
  return std::make_unique<cpu::CpuWorkspace>(config, workspace);
}

std::unique_ptr<LayerBackend> make_backend(const LayerConfig& config, Workspace::Impl& workspace) {
  if (config.backend == Backend::cuda) return cuda::make_backend(config, workspace);
  return std::make_unique<cpu::CpuBackend>(config, workspace);
}

}  // namespace megamoe
