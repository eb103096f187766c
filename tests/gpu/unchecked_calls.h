// Calls as those of a training loop that never asks how they ended.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/runtime.h"
#include "layer_fixture.h"
#include "verify/device_copies.h"

namespace megamoe::verify {

/// Forward calls of a session's layer on device copies of its tensors.
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
  }

  void forward() { layer_.forward(input_, output_, copies_.stream()); }
  void synchronize() const {
    cuda::check(cudaStreamSynchronize(static_cast<cudaStream_t>(copies_.stream().handle)),
                "unchecked calls");
  }

 private:
  MoeLayer& layer_;
  DeviceCopies copies_;
  ForwardInput input_;
  ForwardOutput output_;
};

}  // namespace megamoe::verify
