// The ranks that share memory with this one: those of its host.
#pragma once

#include "megamoe/communicator.h"
#include "megamoe/topology.h"

namespace megamoe::cuda {

struct RanksOfHost {
  explicit RanksOfHost(const Communicator& group)
      : topology(group.topology()),
        first(topology.rank_of(topology.host_of(group.rank()), 0)),
        count(topology.ranks_per_host()) {}
  [[nodiscard]] bool has(int rank) const { return rank >= first && rank < first + count; }

  Topology topology;
  int first;
  int count;
};

}  // namespace megamoe::cuda
