// Ranks on CUDA devices. Without CUDA types, and there also where the library was built without
// CUDA.
#pragma once

#include <memory>

#include "megamoe/communicator.h"

namespace megamoe {

/// Devices that this process sees; 0 without a driver or without CUDA in the build.
int num_cuda_devices();

/// This rank's communicator for layers of Backend::cuda: `group` (ranks as threads or as processes
/// of a host) meets and agrees as before, symmetric memory lies on CUDA device `device` of this
/// rank. `group` must outlive it. Collective.
///
/// Ranks with a device each reach each other's memory through NCCL's symmetric windows (NCCL
/// 2.28.9 or newer, loaded when first needed). Up to 16 ranks of one process may also share one
/// device, with two hardware queues each (CUDA_DEVICE_MAX_CONNECTIONS, 8 by default); their calls
/// meet on the host, each from a thread of its own. A group of one rank needs no NCCL. Throws on
/// every rank: unsupported where NCCL is missing or too old, where ranks are on several hosts,
/// where their devices are neither of the two, where they share one with too few queues, where a
/// device cannot run the kernels or where one cannot load and store in another's memory;
/// invalid_argument for a device that is not there.
std::unique_ptr<Communicator> make_cuda_communicator(Communicator& group, int device);

}  // namespace megamoe
