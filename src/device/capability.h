// Which devices the CUDA backend runs on, and in words why not. Plain host code: needs no CUDA.
#pragma once

#include <string>

namespace megamoe::device {

struct Capability {
  bool can_run = false;
  std::string reason;  ///< one sentence, also when it can run
};

/// `major`.`minor` is the compute capability that the CUDA runtime reports.
Capability capability_of(int major, int minor);

}  // namespace megamoe::device
