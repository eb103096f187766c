// Ranks on CUDA devices. Without CUDA types, and there also where the library was built without
// CUDA.
#pragma once

#include <memory>

#include "megamoe/communicator.h"

namespace megamoe {

/// Devices that this process sees; 0 without a driver or without CUDA in the build.
int num_cuda_devices();

/// How calls over several hosts run; equal on all ranks.
struct CudaOptions {
  /// Groups of neighbouring experts that a call is cut into, at most 8 and as many as a rank has
  /// experts: one is computed while the next one's tokens and the last one's results travel. 0: as
  /// the measured link and the layer's sizes suggest. A layer whose `overlap` is off has one group.
  int network_groups = 0;
  /// CTAs that a transfer between hosts takes while it runs, and with them multiprocessors, which
  /// products of a call that overlaps leave to it. 0: the default, 8.
  int network_ctas = 0;
};

/// This rank's communicator for layers of Backend::cuda: `group` (ranks as threads, as processes of
/// a host, or on several hosts) meets and agrees as before, symmetric memory lies on CUDA device
/// `device` of this rank. `group` must outlive it. Collective.
///
/// Ranks of a host with a device each reach each other's memory through NCCL's symmetric windows
/// (NCCL 2.28.9 or newer, loaded when first needed). All ranks of a host, up to 16, may also share
/// one device where they are threads of one process, with two hardware queues each
/// (CUDA_DEVICE_MAX_CONNECTIONS, 8 by default); a host with one rank needs no windows. Hosts are
/// joined by NCCL's send and receive, on whatever network it works on; stand-in hosts of one
/// process by copies. Throws on every rank: unsupported where NCCL is missing or too old, where the
/// devices of a host's ranks are neither of the two, where they share one with too few queues,
/// where a device cannot run the kernels or where one cannot load and store in another's memory of
/// its host; invalid_argument for a device that is not there; deadline_exceeded or peer_failed
/// where hosts do not reach each other.
std::unique_ptr<Communicator> make_cuda_communicator(Communicator& group, int device);
std::unique_ptr<Communicator> make_cuda_communicator(Communicator& group, int device,
                                                     const CudaOptions& options);

}  // namespace megamoe
