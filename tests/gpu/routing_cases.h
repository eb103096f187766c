// Random calls of a group: who has how many tokens, which experts they name, and what their rows
// hold. Every value is finite; the patterns are those that plans get wrong.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <random>
#include <vector>

#include "comm/workspace_layout.h"

namespace megamoe::testing {

/// Strides of the caller's tensors: none is dense.
constexpr std::int64_t id_stride(const WorkspaceDims& dims) { return dims.routing.top_k + 1; }
constexpr std::int64_t weight_stride(const WorkspaceDims& dims) { return dims.routing.top_k + 2; }
constexpr std::int64_t row_stride(const WorkspaceDims& dims) { return dims.hidden_dim + 8; }

/// What one rank passes to a forward and a backward call.
struct RankInput {
  std::int64_t num_tokens = 0;
  std::vector<std::int32_t> ids;
  std::vector<float> weights;
  std::vector<bf16> x;
  std::vector<bf16> dy;
};

enum class Pattern { uniform, holes, duplicates, skewed, one_expert, empty, last };

class CaseMaker {
 public:
  CaseMaker(const WorkspaceDims& dims, std::uint64_t seed) : dims_(dims), random_(seed) {}

  RankInput rank_input(std::int64_t num_tokens, Pattern pattern) {
    RankInput input;
    input.num_tokens = num_tokens;
    input.ids.assign(num_tokens * id_stride(dims_), 12345);
    for (std::int64_t token = 0; token < num_tokens; ++token) {
      for (std::int32_t slot = 0; slot < dims_.routing.top_k; ++slot) {
        input.ids[token * id_stride(dims_) + slot] = id(pattern);
      }
    }
    input.weights.resize(num_tokens * weight_stride(dims_));
    for (float& weight : input.weights) weight = to_float(row_value()) - 0.25F;
    input.x = rows(num_tokens, row_stride(dims_));
    input.dy = rows(num_tokens, row_stride(dims_));
    return input;
  }

  std::vector<RankInput> group_input(Pattern pattern) {
    std::vector<RankInput> inputs;
    for (std::int32_t rank = 0; rank < dims_.routing.num_ranks; ++rank) {
      inputs.push_back(rank_input(num_tokens(), pattern));
    }
    return inputs;
  }

  /// num_rows dense rows of `stride` random values.
  std::vector<bf16> rows(std::int64_t num_rows, std::int64_t stride) {
    std::vector<bf16> values(num_rows * stride);
    for (bf16& value : values) value = row_value();
    return values;
  }
  std::vector<float> floats(std::int64_t count) {
    std::vector<float> values(count);
    for (float& value : values) value = to_float(row_value());
    return values;
  }

  Pattern any_pattern() {
    return static_cast<Pattern>(random_() % static_cast<int>(Pattern::last));
  }

 private:
  std::int64_t num_tokens() {
    constexpr std::array<std::int64_t, 10> kSizes = {0, 1, 2, 7, 8, 31, 64, 100, 256, 257};
    return std::min<std::int64_t>(dims_.max_tokens, kSizes[random_() % kSizes.size()]);
  }

  std::int32_t id(Pattern pattern) {
    const auto num_experts = static_cast<std::uint64_t>(dims_.routing.num_experts);
    const std::uint64_t bits = random_();
    switch (pattern) {
      case Pattern::holes:
        return bits % 3 == 0 ? -1 : static_cast<std::int32_t>((bits >> 8) % num_experts);
      case Pattern::duplicates:
        return static_cast<std::int32_t>(bits % 2 * (num_experts - 1));
      case Pattern::skewed:
        return static_cast<std::int32_t>(bits % 4 != 0 ? 0 : (bits >> 8) % num_experts);
      case Pattern::one_expert:
        return static_cast<std::int32_t>(num_experts / 2);
      case Pattern::empty:
        return -1;
      default:
        return static_cast<std::int32_t>(bits % num_experts);
    }
  }

  /// Between 2^-15 and 2, of either sign.
  bf16 row_value() {
    const std::uint64_t bits = random_();
    return {static_cast<std::uint16_t>((bits & 0x8000U) | (0x3800U + ((bits >> 20) & 0x7ffU)))};
  }

  const WorkspaceDims& dims_;
  std::mt19937_64 random_;
};

}  // namespace megamoe::testing
