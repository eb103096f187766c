// Calls as those of a training loop that never asks how they ended.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/runtime.h"
#include "layer_fixture.h"
#include "verify/device_copies.h"

namespace megamoe::verify {

/// Calls of a layer on device copies of a rank's tensors.
class UncheckedCalls {
 public:
  UncheckedCalls(RankSession& session, const Communicator& group)
      : UncheckedCalls(session.layer(), session.data(), group) {}
  UncheckedCalls(MoeLayer& layer, RankData& data, const Communicator& group)
      : layer_(layer), data_(data), copies_(cuda_device_of(group.rank(), group.size())) {
    const ForwardInput host = data.forward_input();
    input_ = {copies_.upload(host.x),
              copies_.upload(host.expert_ids),
              copies_.upload(host.weights),
              {copies_.upload(host.experts.gate), copies_.upload(host.experts.up),
               copies_.upload(host.experts.down)}};
    output_ = {copies_.upload(data.forward_output().y)};
    backward_input_ = {input_.x, copies_.upload(data.backward_input().dy), input_.experts};
    const BackwardOutput gradients = data.backward_output();
    backward_output_ = {
        copies_.upload(gradients.dx),
        copies_.upload(gradients.dweights),
        {copies_.upload(gradients.experts.gate), copies_.upload(gradients.experts.up),
         copies_.upload(gradients.experts.down)}};
  }

  CallContext forward() { return layer_.forward(input_, output_, copies_.stream()); }
  void backward(const CallContext& call) { backward(call, copies_.stream()); }
  void backward(const CallContext& call, Stream stream) {
    layer_.backward(call, backward_input_, backward_output_, stream);
  }
  [[nodiscard]] Stream stream() const { return copies_.stream(); }
  [[nodiscard]] cudaStream_t cuda_stream() const {
    return static_cast<cudaStream_t>(copies_.stream().handle);
  }
  void synchronize() const { cuda::check(cudaStreamSynchronize(cuda_stream()), "unchecked calls"); }

  /// On the stream: y, dx and dweights become NaN, weight gradients 0.186, to which calls may add.
  void reset() const {
    for (const TensorView& tensor : {output_.y, backward_output_.dx, backward_output_.dweights}) {
      fill(tensor, 0xff);
    }
    const ExpertGradients& gradients = backward_output_.experts;
    for (const TensorView& tensor : {gradients.gate, gradients.up, gradients.down}) {
      fill(tensor, 0x3e);
    }
  }
  /// What all calls on the stream have left.
  const LayerTensors& download() {
    copies_.download(data_.forward_output().y);
    const BackwardOutput host = data_.backward_output();
    for (const TensorView& tensor :
         {host.dx, host.dweights, host.experts.gate, host.experts.up, host.experts.down}) {
      copies_.download(tensor);
    }
    return data_.tensors();
  }

 private:
  void fill(const TensorView& tensor, int byte) const {
    std::int64_t bytes = dtype_bytes(tensor.dtype);
    for (int dim = 0; dim < tensor.num_dims; ++dim) bytes *= tensor.sizes[dim];
    cuda::check(cudaMemsetAsync(tensor.data, byte, static_cast<std::size_t>(bytes), cuda_stream()),
                "outputs before a step");
  }

  MoeLayer& layer_;
  RankData& data_;
  DeviceCopies copies_;
  ForwardInput input_;
  ForwardOutput output_;
  BackwardInput backward_input_;
  BackwardOutput backward_output_;
};

}  // namespace megamoe::verify
