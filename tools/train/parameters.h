// Where parameters live: groups of named tensors in flat buffers, so that a gradient all-reduce, an
// optimizer step and a checkpoint are each one pass over memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "megamoe/bf16.h"
#include "train/backend.h"

namespace megamoe::trainer {

enum class WeightDecay : std::uint8_t { applies, none };

/// A tensor's place in its group.
struct ParameterSlice {
  std::string name;
  std::size_t offset = 0;
  std::size_t count = 0;
  WeightDecay weight_decay = WeightDecay::applies;
};

/// Parameters that are kept alike: master values in fp32, gradients, and AdamW's two moments. The
/// model has two groups: `shared` (embedding, norms, routers; equal on every rank, gradients summed
/// over the ranks) and `experts` (this rank's experts; gradients come out of the layer complete).
class ParameterGroup {
 public:
  /// Finds a place for a tensor. All tensors are added before allocate().
  ParameterSlice add(std::string name, std::int64_t count, WeightDecay weight_decay);
  /// Zeros for all tensors, in the backend's memory, where all pointers and spans below point.
  void allocate(TrainBackend& backend);

  [[nodiscard]] const std::vector<ParameterSlice>& slices() const { return slices_; }
  [[nodiscard]] std::size_t count() const { return count_; }

  [[nodiscard]] std::span<float> values() { return values_.span(); }
  [[nodiscard]] std::span<float> gradients() { return gradients_.span(); }
  [[nodiscard]] std::span<float> first_moments() { return first_moments_.span(); }
  [[nodiscard]] std::span<float> second_moments() { return second_moments_.span(); }

  [[nodiscard]] float* values(const ParameterSlice& slice) { return values_.data() + slice.offset; }
  [[nodiscard]] float* gradients(const ParameterSlice& slice) {
    return gradients_.data() + slice.offset;
  }

  /// Copies in bf16, which the layer reads; as of the last round_values().
  [[nodiscard]] const bf16* rounded(const ParameterSlice& slice) const {
    return rounded_.data() + slice.offset;
  }
  void round_values(Operations& operations);

 private:
  std::vector<ParameterSlice> slices_;
  std::size_t count_ = 0;
  Buffer<float> values_;
  Buffer<float> gradients_;
  Buffer<float> first_moments_;
  Buffer<float> second_moments_;
  Buffer<bf16> rounded_;
};

}  // namespace megamoe::trainer
