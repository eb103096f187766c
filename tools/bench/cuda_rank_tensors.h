// Tensors of a layer on one rank's device, for what times or records a layer: random inputs at unit
// scale, weights at 1/sqrt(fan in).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <initializer_list>
#include <vector>

#include "cuda/runtime.h"
#include "megamoe/megamoe.h"

namespace megamoe::bench {

class DeviceTensor {
 public:
  DeviceTensor(int device, std::int64_t count, std::int64_t element_bytes)
      : count_(count), memory_(device, count * element_bytes, "a benchmark's tensor") {}

  /// About normal numbers of standard deviation `scale`; on the default stream.
  void fill(float scale, std::uint64_t seed);
  template <class T>
  TensorView view(std::initializer_list<std::int64_t> sizes) {
    return tensor_view(reinterpret_cast<T*>(memory_.data()), sizes);
  }
  template <class T>
  void upload(const std::vector<T>& values) {
    cuda::check(cudaMemcpy(memory_.data(), values.data(), values.size() * sizeof(T),
                           cudaMemcpyHostToDevice),
                "upload");
  }

 private:
  std::int64_t count_;
  cuda::DeviceMemory memory_;
};

/// Tensors of one rank. e = E/R experts.
struct RankTensors {
  RankTensors(const LayerConfig& config, int num_ranks, int rank, int device,
              const std::vector<std::int32_t>& ids);

  ExpertWeights experts() {
    return {gate.view<bf16>({e, I, H}), up.view<bf16>({e, I, H}), down.view<bf16>({e, H, I})};
  }
  ForwardInput forward_input() {
    return {x.view<bf16>({T, H}), ids_TK.view<std::int32_t>({T, K}), weights.view<float>({T, K}),
            experts()};
  }
  ForwardOutput forward_output() { return {y.view<bf16>({T, H})}; }
  BackwardInput backward_input() {
    return {x.view<bf16>({T, H}), dy.view<bf16>({T, H}), experts()};
  }
  BackwardOutput backward_output() {
    const auto gradient = [&](DeviceTensor& tensor, std::initializer_list<std::int64_t> sizes) {
      return stores_bf16 ? tensor.view<bf16>(sizes) : tensor.view<float>(sizes);
    };
    return {dx.view<bf16>({T, H}),
            dweights.view<float>({T, K}),
            {gradient(dgate, {e, I, H}), gradient(dup, {e, I, H}), gradient(ddown, {e, H, I})}};
  }

  std::int64_t T, H, I, K, e;
  bool stores_bf16;
  DeviceTensor x, dy, y, dx, ids_TK, weights, dweights, gate, up, down, dgate, dup, ddown;
};

}  // namespace megamoe::bench
