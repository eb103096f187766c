// In the process of one host, which host_processes.h starts: its ranks, threads, and their group.
#pragma once

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "hosts_cases.h"
#include "megamoe/network.h"
#include "verify/run.h"

namespace megamoe::verify {

/// Of this process's environment; "" or 0 where it is not set.
inline std::string test_variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}
inline int test_number(const char* name) { return std::atoi(test_variable(name).c_str()); }

/// The host that this process is, and its group: hosts x ranks of a host.
struct ThisHost {
  int host = test_number("MEGAMOE_TEST_HOST");
  Layout layout{2, test_number("MEGAMOE_TEST_RANKS_PER_HOST")};

  /// Runs `rank_main` on a thread a rank of this host.
  void run(const std::function<void(Communicator&)>& rank_main) const {
    std::vector<std::thread> threads;
    for (int index = 0; index < layout.ranks_per_host; ++index) {
      threads.emplace_back([&, index] {
        try {
          const auto group =
              make_network_communicator({.rank = host * layout.ranks_per_host + index,
                                         .num_ranks = layout.num_ranks(),
                                         .rendezvous = test_variable("MEGAMOE_TEST_RENDEZVOUS"),
                                         .host_name = "host " + std::to_string(host)},
                                        60.0);
          rank_main(*group);
        } catch (const std::exception& error) {
          std::fprintf(stderr, "host %d, rank %d of it: %s\n", host, index, error.what());
          std::fflush(nullptr);
          _exit(9);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
};

/// On the devices of the host that a rank of `group` is on.
inline RunOptions options_of(Communicator& group) {
  RunOptions options;
  options.group = &group;
  return options;
}

}  // namespace megamoe::verify
