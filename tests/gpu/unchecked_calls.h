// Calls as those of a training loop that never asks how they ended.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/runtime.h"
#include "layer_fixture.h"
#include "verify/device_copies.h"

namespace megamoe::verify {

/// Calls of a session's layer on device copies of its tensors.
class UncheckedCalls {
 public:
  UncheckedCalls(RankSession& session, const Communicator& group)
      : layer_(session.layer()), copies_(cuda_device_of(group.rank(), group.size())) {
    const ForwardInput host = session.data().forward_input();
    input_ = {copies_.upload(host.x),
              copies_.upload(host.expert_ids),
              copies_.upload(host.weights),
              {copies_.upload(host.experts.gate), copies_.upload(host.experts.up),
               copies_.upload(host.experts.down)}};
    output_ = {copies_.upload(session.data().forward_output().y)};
    backward_input_ = {input_.x, copies_.upload(session.data().backward_input().dy),
                       input_.experts};
    const BackwardOutput gradients = session.data().backward_output();
    backward_output_ = {
        copies_.upload(gradients.dx),
        copies_.upload(gradients.dweights),
        {copies_.upload(gradients.experts.gate), copies_.upload(gradients.experts.up),
         copies_.upload(gradients.experts.down)}};
  }

  CallContext forward() { return layer_.forward(input_, output_, copies_.stream()); }
  void backward(const CallContext& call) {
    layer_.backward(call, backward_input_, backward_output_, copies_.stream());
  }
  [[nodiscard]] Stream stream() const { return copies_.stream(); }
  void synchronize() const {
    cuda::check(cudaStreamSynchronize(static_cast<cudaStream_t>(copies_.stream().handle)),
                "unchecked calls");
  }

 private:
  MoeLayer& layer_;
  DeviceCopies copies_;
  ForwardInput input_;
  ForwardOutput output_;
  BackwardInput backward_input_;
  BackwardOutput backward_output_;
};

}  // namespace megamoe::verify
