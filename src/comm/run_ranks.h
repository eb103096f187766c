// Ranks as threads, whatever joins them.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "megamoe/communicator.h"

namespace megamoe {

/// Runs `rank_main` on a thread for each of the communicators, and ends as run_ranks() does.
void run_ranks_of(std::vector<std::unique_ptr<Communicator>> communicators,
                  const std::function<void(Communicator&)>& rank_main);

}  // namespace megamoe
