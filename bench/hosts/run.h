// What each rank of hosts_bench does.
#pragma once

#include "megamoe/communicator.h"
#include "options.h"

namespace megamoe::bench {

/// Collective. Rank 0 prints, and writes records and timelines where the options say so.
void run_rank(const Options& options, Communicator& hosts);

}  // namespace megamoe::bench
