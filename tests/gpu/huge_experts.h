// Experts of a rank that take more than 2^31 elements, in guarded buffers; rows come to the last
// one alone.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "gpu/layer_device.h"

namespace megamoe::verify {

/// Of a layer of one expert, 512 of which take more than 2^31 elements.
inline ProblemSpec spec_of_one_huge_expert(std::int64_t num_tokens) {
  ProblemSpec spec = spec_with_tokens({num_tokens});
  spec.hidden_dim = 5120;
  spec.intermediate_dim = 2048;
  spec.num_experts = 1;
  spec.top_k = 1;
  return spec;
}

class HugeExperts {
 public:
  /// The last expert has the weights of `only`, which has one expert and must outlive this; those
  /// of the others are NaN.
  HugeExperts(std::int64_t num_experts, const DeviceProblem& only)
      : only_(only),
        num_experts_(num_experts),
        gate_(num_experts * size_),
        up_(num_experts * size_),
        down_(num_experts * size_),
        dgate_(num_experts * size_ + kGuard),
        dup_(num_experts * size_ + kGuard),
        ddown_(num_experts * size_ + kGuard) {
    const std::pair<const OnDevice<bf16>*, const OnDevice<bf16>*> weights[] = {
        {&gate_, &only.gate}, {&up_, &only.up}, {&down_, &only.down}};
    for (const auto& [all, last] : weights) {
      cuda::check(cudaMemcpy(all->data() + last_, last->data(), size_ * sizeof(bf16),
                             cudaMemcpyDeviceToDevice),
                  "placing an expert");
    }
  }

  [[nodiscard]] ExpertWeights weights() const {
    return {view(gate_, only_.I, only_.H), view(up_, only_.I, only_.H),
            view(down_, only_.H, only_.I)};
  }
  [[nodiscard]] ExpertGradients gradients() const {
    return {view(dgate_, only_.I, only_.H), view(dup_, only_.I, only_.H),
            view(ddown_, only_.H, only_.I)};
  }

  /// Those of `only` for the last expert, zeros for the one before it.
  void expect_gradients_of_the_last() const {
    expect_gradients(only_.dgate.download(), only_.dup.download(), only_.ddown.download());
  }
  /// Of a rank without rows.
  void expect_zeros() const {
    const std::vector<bf16> zeros(size_);
    expect_gradients(zeros, zeros, zeros);
  }

 private:
  static constexpr std::int64_t kGuard = 4096;

  [[nodiscard]] TensorView view(const OnDevice<bf16>& tensor, std::int64_t rows,
                                std::int64_t columns) const {
    return tensor.view({num_experts_, rows, columns});
  }
  void expect_gradients(const std::vector<bf16>& dgate, const std::vector<bf16>& dup,
                        const std::vector<bf16>& ddown) const {
    const std::pair<const OnDevice<bf16>*, const std::vector<bf16>*> gradients[] = {
        {&dgate_, &dgate}, {&dup_, &dup}, {&ddown_, &ddown}};
    for (const auto& [all, last] : gradients) {
      EXPECT_TRUE(same_bits(all->download(last_, size_), *last));
      EXPECT_TRUE(same_bits(all->download(last_ - size_, size_), std::vector<bf16>(size_)));
      EXPECT_TRUE(same_bits(all->download(num_experts_ * size_, kGuard),
                            std::vector<bf16>(kGuard, bf16{0xffff})));
    }
  }

  const DeviceProblem& only_;
  std::int64_t num_experts_;
  std::int64_t size_ = only_.I * only_.H;
  std::int64_t last_ = (num_experts_ - 1) * size_;
  OnDevice<bf16> gate_, up_, down_, dgate_, dup_, ddown_;
};

}  // namespace megamoe::verify
