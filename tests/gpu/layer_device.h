// What tests of the layer on device 0 share: tensors, a stream, a layer of one rank.
#pragma once

#include <cuda_runtime_api.h>

#include <cstring>
#include <memory>
#include <vector>

#include "cuda/runtime.h"
#include "layer_fixture.h"
#include "megamoe/cuda.h"

namespace megamoe::verify {

/// A device tensor whose contents are given.
template <class T>
class OnDevice {
 public:
  explicit OnDevice(const std::vector<T>& values)
      : OnDevice(static_cast<std::int64_t>(values.size())) {
    cuda::check(cudaMemcpy(memory_.data(), values.data(), values.size() * sizeof(T),
                           cudaMemcpyHostToDevice),
                "upload");
  }
  /// Every byte 0xff: NaN.
  explicit OnDevice(std::int64_t count)
      : count_(count), memory_(0, count * static_cast<std::int64_t>(sizeof(T)), "a test's tensor") {
    cuda::check(cudaMemset(memory_.data(), 0xff, count * sizeof(T)), "poison");
    cuda::check(cudaDeviceSynchronize(), "poison");
  }
  [[nodiscard]] TensorView view(std::initializer_list<std::int64_t> sizes) const {
    return tensor_view(reinterpret_cast<T*>(memory_.data()), sizes);
  }
  [[nodiscard]] T* data() const { return reinterpret_cast<T*>(memory_.data()); }
  [[nodiscard]] std::vector<T> download() const { return download(0, count_); }
  [[nodiscard]] std::vector<T> download(std::int64_t first, std::int64_t count) const {
    std::vector<T> values(count);
    cuda::check(cudaMemcpy(values.data(), data() + first, values.size() * sizeof(T),
                           cudaMemcpyDeviceToHost),
                "download");
    return values;
  }

 private:
  std::int64_t count_;
  cuda::DeviceMemory memory_;
};

inline bool same_bits(const std::vector<bf16>& left, const std::vector<bf16>& right) {
  return left.size() == right.size() &&
         std::memcmp(left.data(), right.data(), left.size() * sizeof(bf16)) == 0;
}

class TestStream {
 public:
  TestStream() {
    cuda::check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "a stream");
  }
  TestStream(const TestStream&) = delete;
  TestStream& operator=(const TestStream&) = delete;
  ~TestStream() { cudaStreamDestroy(stream_); }
  [[nodiscard]] cudaStream_t get() const { return stream_; }
  operator Stream() const { return {stream_}; }  // NOLINT(google-explicit-constructor)

 private:
  cudaStream_t stream_ = nullptr;
};

/// One rank's tensors of a problem on device 0.
struct DeviceProblem {
  explicit DeviceProblem(const Problem& problem)
      : T(problem.spec.num_tokens()),
        H(problem.spec.hidden_dim),
        I(problem.spec.intermediate_dim),
        E(problem.spec.num_experts),
        K(problem.spec.top_k),
        x(problem.x_TH),
        dy(problem.dy_TH),
        y(T * H),
        dx(T * H),
        gate(problem.gate_EIH),
        up(problem.up_EIH),
        down(problem.down_EHI),
        dgate(E * I * H),
        dup(E * I * H),
        ddown(E * I * H),
        ids(problem.expert_ids_TK),
        weights(problem.weights_TK),
        dweights(T * K) {}

  [[nodiscard]] ExpertWeights experts() const {
    return {gate.view({E, I, H}), up.view({E, I, H}), down.view({E, H, I})};
  }
  [[nodiscard]] ForwardInput forward_input() const {
    return {x.view({T, H}), ids.view({T, K}), weights.view({T, K}), experts()};
  }
  [[nodiscard]] ForwardOutput forward_output() const { return {y.view({T, H})}; }
  [[nodiscard]] BackwardInput backward_input() const {
    return {x.view({T, H}), dy.view({T, H}), experts()};
  }
  [[nodiscard]] BackwardOutput backward_output() const {
    return {dx.view({T, H}),
            dweights.view({T, K}),
            {dgate.view({E, I, H}), dup.view({E, I, H}), ddown.view({E, H, I})}};
  }

  struct Bits {
    std::vector<bf16> y, dx, dgate, dup, ddown;
    std::vector<float> dweights;
    [[nodiscard]] bool equal(const Bits& other) const {
      return same_bits(y, other.y) && same_bits(dx, other.dx) && same_bits(dgate, other.dgate) &&
             same_bits(dup, other.dup) && same_bits(ddown, other.ddown) &&
             std::memcmp(dweights.data(), other.dweights.data(), dweights.size() * 4) == 0;
    }
  };
  [[nodiscard]] Bits bits() const {
    return {y.download(),   dx.download(),    dgate.download(),
            dup.download(), ddown.download(), dweights.download()};
  }
  void poison() const {
    cuda::check(cudaMemset(y.data(), 0xff, T * H * 2), "poison");
    cuda::check(cudaMemset(dx.data(), 0xff, T * H * 2), "poison");
    cuda::check(cudaMemset(dweights.data(), 0xff, T * K * 4), "poison");
    for (const auto* tensor : {&dgate, &dup, &ddown}) {
      cuda::check(cudaMemset(tensor->data(), 0xff, E * I * H * 2), "poison");
    }
    cuda::check(cudaDeviceSynchronize(), "poison");
  }

  std::int64_t T, H, I, E, K;
  OnDevice<bf16> x, dy, y, dx, gate, up, down, dgate, dup, ddown;
  OnDevice<std::int32_t> ids;
  OnDevice<float> weights, dweights;
};

/// A layer of one rank on device 0.
struct OneRank {
  explicit OneRank(const LayerConfig& config)
      : threads(make_thread_communicators(1)),
        group(make_cuda_communicator(*threads[0], 0)),
        workspace(config, *group),
        layer(config, *group, workspace) {}
  std::vector<std::unique_ptr<Communicator>> threads;
  std::unique_ptr<Communicator> group;
  Workspace workspace;
  MoeLayer layer;
};

inline LayerConfig cuda_config(const ProblemSpec& spec) {
  RunOptions options;
  options.backend = Backend::cuda;
  return layer_config(spec, options);
}

/// One step of a layer of one rank.
inline void step_on_one_rank(const ProblemSpec& spec, const DeviceProblem& tensors) {
  const TestStream stream;
  OneRank rank(cuda_config(spec));
  const CallContext call =
      rank.layer.forward(tensors.forward_input(), tensors.forward_output(), stream);
  rank.layer.backward(call, tensors.backward_input(), tensors.backward_output(), stream);
  rank.layer.check(stream);
}

}  // namespace megamoe::verify
