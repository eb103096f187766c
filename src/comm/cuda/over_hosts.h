// CUDA communicators of groups that may span several hosts. Not public yet: tests and benchmarks
// use it, make_cuda_communicator() refuses such groups by name (docs/network.md says why).
#pragma once

#include <memory>

#include "megamoe/communicator.h"

namespace megamoe::cuda {

/// How calls over several hosts run; equal on all ranks.
struct HostsOptions {
  /// Groups of neighbouring experts that a call is cut into, at most 8 and as many as a rank has
  /// experts: one is computed while the next one's tokens and the last one's results travel. 0: as
  /// the measured link and the layer's sizes suggest. A layer whose `overlap` is off has one group.
  int network_groups = 0;
  /// CTAs that a transfer between hosts takes while it runs, and with them multiprocessors, which
  /// products of a call that overlaps leave to it. 0: the default, 8.
  int network_ctas = 0;
};

/// make_cuda_communicator() of cuda.h, for groups on several hosts, too. They are joined by NCCL's
/// send and receive, on whatever network it works on; stand-in hosts that are threads of one
/// process by copies. A host with one rank needs no windows. Throws also deadline_exceeded or
/// peer_failed where hosts do not reach each other, config_mismatch where options differ.
std::unique_ptr<Communicator> make_communicator_over_hosts(Communicator& group, int device,
                                                           const HostsOptions& options);

}  // namespace megamoe::cuda
