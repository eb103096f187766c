// What hosts_bench is asked to measure.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bench/cuda_bursts.h"
#include "common/launch.h"
#include "megamoe/config.h"

namespace megamoe::bench {

inline constexpr double kDeadlineS = 60.0;  ///< of waits for other ranks

struct Options {
  std::int64_t num_tokens = 4096;
  std::int64_t hidden_dim = 1024;
  std::int64_t intermediate_dim = 32768;
  std::int32_t num_experts = 16;
  std::int32_t top_k = 8;
  std::vector<int> groups = {2, 4, 8};
  std::vector<int> ctas = {8};
  std::vector<std::int64_t> sizes_tokens;  ///< of which exact and padded messages are compared
  int num_repeats = 7;
  int pause_ms = static_cast<int>(kBurstPause.count());  ///< before each timed pass
  std::string json_path;
  std::string trace_path;
  std::string command;  ///< that started the benchmark
  tools::LaunchOptions launch;
};

inline MoeShape shape_of(const Options& options) {
  return {options.num_tokens, options.hidden_dim, options.intermediate_dim, options.num_experts,
          options.top_k};
}

}  // namespace megamoe::bench
