// Ranks as processes of a host that know each other by other ways, too.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "megamoe/communicator.h"

namespace megamoe {

/// make_process_communicator() of communicator.h that calls `check_peers` again and again while it
/// waits for the other processes; what that throws ends the wait. A process that ends before it
/// has come leaves nothing in shared memory that would say so.
std::unique_ptr<Communicator> make_process_communicator(const std::string& name, int rank,
                                                        int num_ranks, double deadline_s,
                                                        const std::function<void()>& check_peers);

}  // namespace megamoe
