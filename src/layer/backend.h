// What a backend gives to MoeLayer.
#pragma once

#include <cstdint>
#include <memory>

#include "comm/workspace_layout.h"
#include "layer/call_context.h"
#include "layer/workspace.h"
#include "megamoe/layer.h"

namespace megamoe {

/// One layer on one rank. Backends validate arguments themselves, because how ranks agree about an
/// error differs: the CPU backend exchanges it at once, a GPU must not wait for the host.
class LayerBackend {
 public:
  LayerBackend() = default;
  LayerBackend(const LayerBackend&) = delete;
  LayerBackend& operator=(const LayerBackend&) = delete;
  virtual ~LayerBackend() = default;

  /// The capture into a CUDA graph that the stream is in; 0 for none. Throws nothing.
  [[nodiscard]] virtual std::uint64_t capture_of(Stream /*stream*/) const { return 0; }
  /// Makes `state` where it is null: a rank without memory for it fails the call on all ranks.
  virtual void forward(std::unique_ptr<CallState>& state, const ForwardInput& input,
                       const ForwardOutput& output, Stream stream) = 0;
  /// `state` is null where the caller's context is not one of this layer's: an error on every rank.
  virtual void backward(const CallState* state, const BackwardInput& input,
                        const BackwardOutput& output, Stream stream) = 0;
  virtual void check(Stream stream) = 0;
};

/// What a workspace of these sizes takes. Computed, not measured: needs no device.
WorkspaceBytes backend_bytes(Backend backend, const WorkspaceDims& dims, int num_hosts);

/// The rest of a workspace whose symmetric memory exists. Throws Error.
std::unique_ptr<WorkspaceMemory> make_workspace_memory(const LayerConfig& config,
                                                       Workspace::Impl& workspace);

/// `workspace` is large enough, of the same backend, and outlives what is made.
std::unique_ptr<LayerBackend> make_backend(const LayerConfig& config, Workspace::Impl& workspace);

}  // namespace megamoe
