// Groups on stand-in hosts: processes of this machine that name different ones.
#pragma once

#include <memory>
#include <string>

#include "free_rendezvous.h"
#include "megamoe/network.h"
#include "process_fixture.h"

namespace megamoe {

inline std::unique_ptr<Communicator> join_network(const std::string& rendezvous, int rank,
                                                  const Topology& topology, double deadline_s) {
  return make_network_communicator(
      {rank, topology.num_ranks(), rendezvous, topology.host_name(topology.host_of(rank))},
      deadline_s);
}

/// run_processes() of process_fixture.h, each with its communicator.
template <class RankMain>
std::vector<int> run_network_processes(const Topology& topology, double deadline_s,
                                       const RankMain& rank_main) {
  const std::string rendezvous = free_rendezvous();
  return run_processes(topology.num_ranks(), [&](const std::string& /*name*/, int rank) {
    const auto group = join_network(rendezvous, rank, topology, deadline_s);
    rank_main(*group);
  });
}

}  // namespace megamoe
