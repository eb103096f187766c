// The shapes that products are measured at, and the ragged row counts that uniform random routing
// gives one rank.
#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

namespace megamoe::bench {

struct Shape {
  std::string name;
  int hidden;
  int intermediate;
  int num_experts;  ///< of the whole model
  int num_slots;    ///< experts a token
};

inline const std::vector<Shape>& shapes() {
  static const std::vector<Shape> all = {
      {"qwen3-235b", 4096, 1536, 128, 8},  {"qwen3-30b", 2048, 768, 128, 8},
      {"deepseek-v3", 7168, 2048, 256, 8}, {"mixtral", 4096, 14336, 8, 2},
      {"qwen2-57b", 3584, 2560, 64, 8},    {"qwen1.5-moe", 2048, 1408, 60, 4},
  };
  return all;
}

struct RaggedRows {
  std::vector<std::int32_t> begin;  ///< multiples of 64
  std::vector<std::int32_t> count;
  std::int64_t capacity = 0;
  std::int64_t total = 0;
};

inline RaggedRows lay_out(const std::vector<std::int32_t>& counts) {
  RaggedRows rows;
  rows.count = counts;
  for (const std::int32_t count : counts) {
    rows.begin.push_back(static_cast<std::int32_t>(rows.capacity));
    rows.capacity += (count + 63) / 64 * 64;
    rows.total += count;
  }
  rows.capacity = std::max<std::int64_t>(rows.capacity, 64);
  return rows;
}

/// Rows of rank 0's experts when each of `num_ranks` ranks routes `tokens_per_rank` tokens
/// uniformly at random.
inline RaggedRows route_uniformly(const Shape& shape, int num_ranks, int tokens_per_rank) {
  std::vector<std::int32_t> counts(static_cast<std::size_t>(shape.num_experts / num_ranks), 0);
  std::mt19937 random(1234);
  std::vector<int> experts(static_cast<std::size_t>(shape.num_experts));
  for (int expert = 0; expert < shape.num_experts; ++expert)
    experts[static_cast<std::size_t>(expert)] = expert;
  for (int token = 0; token < num_ranks * tokens_per_rank; ++token) {
    for (int slot = 0; slot < shape.num_slots; ++slot) {
      const int other =
          slot + static_cast<int>(random() % static_cast<unsigned>(shape.num_experts - slot));
      std::swap(experts[static_cast<std::size_t>(slot)], experts[static_cast<std::size_t>(other)]);
      const auto expert = static_cast<std::size_t>(experts[static_cast<std::size_t>(slot)]);
      if (expert < counts.size()) ++counts[expert];
    }
  }
  return lay_out(counts);
}

}  // namespace megamoe::bench
