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
  MoeShape shape{.max_tokens = 4096,  // of each rank
                 .hidden_dim = 1024,
                 .intermediate_dim = 32768,
                 .num_experts = 16,
                 .top_k = 8};
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

}  // namespace megamoe::bench
