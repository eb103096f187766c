// What a backend gives to MoeLayer.
#pragma once

#include "layer/call_context.h"
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

  virtual void forward(CallState& state, const ForwardInput& input, const ForwardOutput& output,
                       Stream stream) = 0;
  /// `state` is null where the caller's context is not one of this layer's: an error on every rank.
  virtual void backward(const CallState* state, const BackwardInput& input,
                        const BackwardOutput& output, Stream stream) = 0;
  virtual void check(Stream stream) = 0;
  virtual std::unique_ptr<CallState> new_call_state() = 0;
};

}  // namespace megamoe
