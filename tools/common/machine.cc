#include "common/machine.h"

#include <algorithm>
#include <fstream>
#include <thread>

namespace megamoe::tools {

std::string processor_name() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    if (!line.starts_with("model name")) continue;
    const auto begin = line.find_first_not_of(" \t", line.find(':') + 1);
    if (begin != std::string::npos) return line.substr(begin);
  }
  return "unknown processor";
}

int num_cpu_threads() { return std::max(1, static_cast<int>(std::thread::hardware_concurrency())); }

}  // namespace megamoe::tools
