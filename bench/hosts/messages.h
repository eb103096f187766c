// How fast messages travel between hosts.
#pragma once

#include "comm/cuda/host_link.h"
#include "megamoe/communicator.h"
#include "records.h"

namespace megamoe::bench {

/// Collective. Times messages of several sizes, prints them on rank 0 and adds records; returns the
/// bytes a second, to and from all other hosts together, of the largest.
double time_messages(Communicator& group, cuda::HostLink& link, int device, int num_ctas,
                     const Machine& machine, Json& records);

}  // namespace megamoe::bench
