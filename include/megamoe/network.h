// Groups whose ranks are on several hosts: docs/network.md.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "megamoe/communicator.h"
#include "megamoe/topology.h"

namespace megamoe {

struct NetworkOptions {
  int rank = 0;
  int num_ranks = 1;
  /// "ADDRESS:PORT" at which rank 0 listens while the group forms; the same on every rank.
  /// ADDRESS is rank 0's host as every other host reaches it. Where it is a loopback address, all
  /// of the group's connections stay on the loopback interface.
  std::string rendezvous;
  /// Ranks with equal names share memory (/dev/shm); at most 200 characters. Empty: the machine's
  /// name and boot id, and NCCL_HOSTID where that is set. Give names where containers of one
  /// machine do not share memory, or to treat one machine as several hosts.
  std::string host_name;
};

/// This process's communicator in a group whose ranks are processes on one or several hosts.
/// Collective: every process calls it and waits for the others up to `deadline_s`. Ranks of a host
/// (and one user) share memory as in make_process_communicator(); its symmetric heaps have null for
/// ranks of other hosts, which layers of Backend::cpu reach by TCP. The network must be one that is
/// trusted: nothing is encrypted, and whoever reaches the port may join.
///
/// Throws as make_process_communicator() does; unsupported for ranks that are not numbered host by
/// host or hosts with different numbers of ranks; deadline_exceeded naming ranks that did not come,
/// or that neither shared memory nor the network reaches.
std::unique_ptr<Communicator> make_network_communicator(const NetworkOptions& options,
                                                        double deadline_s);

/// The communicators of a group whose ranks are threads of this process, as if they were on the
/// hosts of `topology`: ranks of different hosts have no pointers to each other's heaps, and reach
/// each other by TCP on the loopback interface. To try what several hosts do on one machine.
std::vector<std::unique_ptr<Communicator>> make_thread_communicators(const Topology& topology);

/// run_ranks() of communicator.h on such a group.
void run_ranks(const Topology& topology, const std::function<void(Communicator&)>& rank_main);

}  // namespace megamoe
