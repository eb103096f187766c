// What the rest of the library sees of the CUDA backend, in builds with and without it.
#pragma once

#include <memory>

#include "layer/workspace.h"
#include "megamoe/config.h"

namespace megamoe {
class LayerBackend;
}

namespace megamoe::cuda {

/// Whether this build has the backend. If not, the functions below throw.
bool is_built();

std::unique_ptr<WorkspaceMemory> make_workspace_memory(const LayerConfig& config,
                                                       Workspace::Impl& workspace);
std::unique_ptr<LayerBackend> make_backend(const LayerConfig& config, Workspace::Impl& workspace);

}  // namespace megamoe::cuda
