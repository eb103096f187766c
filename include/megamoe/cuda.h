// Ranks on CUDA devices. Without CUDA types, and there also where the library was built without
// CUDA.
#pragma once

#include <memory>

#include "megamoe/communicator.h"

namespace megamoe {

/// Devices that this process sees; 0 without a driver or without CUDA in the build.
int num_cuda_devices();

/// How calls of a group on several hosts run; equal on all ranks. It says nothing on one host.
struct CudaHostsOptions {
  static constexpr int kMostGroups = 8;
  static constexpr int kMostCtas = 64;

  /// Groups of neighbouring experts that a call is cut into, the first and the last half as large
  /// as the others, at most kMostGroups and as many as a rank has experts: one is computed while
  /// the next one's tokens and the last one's results travel. 0: as the measured link and the
  /// layer's sizes suggest. A layer whose `overlap` is off has one group.
  int network_groups = 0;
  /// CTAs that a transfer between hosts takes while it runs, and with them multiprocessors, which
  /// products of a call that overlaps leave to it; at most kMostCtas. 0: the default, 8.
  int network_ctas = 0;
};

/// This rank's communicator for layers of Backend::cuda: `group` (ranks as threads, as processes of
/// a host or of several hosts) meets and agrees as before, symmetric memory lies on CUDA device
/// `device` of this rank. `group` must outlive it. Collective.
///
/// Ranks of a host with a device each reach each other's memory through NCCL's symmetric windows
/// (NCCL 2.28.9 or newer, loaded when first needed). Up to 16 ranks of one process may also share
/// one device, with two hardware queues each (CUDA_DEVICE_MAX_CONNECTIONS, 8 by default); their
/// calls meet on the host, each from a thread of its own. A group of one rank needs no NCCL. Hosts
/// are joined by NCCL's send and receive, on whatever network it works on; stand-in hosts that are
/// threads of one process by copies.
///
/// Throws on every rank: unsupported where NCCL is missing or too old, where the devices of a
/// host's ranks are neither of the two, where they share one with too few queues, where ranks of
/// different hosts are on one device, where a device cannot run the kernels or where one cannot
/// load and store in another's memory; invalid_argument for a device that is not there or options
/// out of range; config_mismatch where options differ. Where a rank does not come (in ten minutes),
/// leaves, or fails while NCCL joins it to the others, it throws its own reason, the others
/// deadline_exceeded or peer_failed with its name; then `group` is over.
std::unique_ptr<Communicator> make_cuda_communicator(Communicator& group, int device,
                                                     const CudaHostsOptions& hosts = {});

}  // namespace megamoe
