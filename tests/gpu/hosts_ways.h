// In which ways tests run layers over hosts, and what the bits are to be.
#pragma once

#include <string>
#include <vector>

#include "hosts_cases.h"
#include "layer_fixture.h"

namespace megamoe::verify {

/// What the layer gives without hosts, or peers that it could wait for.
inline LayerTensors result_of_one_rank(const Problem& problem, RunOptions options) {
  options.num_hosts = 1;
  return run_layer(on_one_rank(problem), options);
}

/// With three groups, one, and as many as there can be.
inline std::vector<RunOptions> ways_of(const RunOptions& options) {
  std::vector<RunOptions> ways(3, options);
  ways[1].overlap = Overlap::off;
  ways[2].cuda_hosts.network_groups = 8;
  return ways;
}

inline std::string way_text(const RunOptions& options) {
  return options.overlap == Overlap::off
             ? "one group"
             : "at most " + std::to_string(options.cuda_hosts.network_groups) + " groups";
}

}  // namespace megamoe::verify
