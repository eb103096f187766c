// A process that a launcher started as one of several ranks: torchrun, mpirun, srun, or by hand.
#pragma once

#include <CLI/CLI.hpp>
#include <memory>
#include <string>

#include "megamoe/cuda.h"
#include "megamoe/network.h"

namespace megamoe::tools {

struct LaunchOptions {
  bool is_launched = false;
  NetworkOptions network = {-1, -1, "", ""};  ///< what was given; the rest comes from the launcher
  double deadline_s = 60.0;
};

/// --launched, and what it needs where the launcher does not say it.
void add_launch_options(CLI::App& command, LaunchOptions& options);

/// --network-groups and --network-ctas, which say how calls over hosts run on GPUs. `hosts`
/// outlives the parsing.
void add_hosts_options(CLI::App& command, CudaHostsOptions& hosts);
/// Throws CLI::ValidationError naming an option that the CPU, whose calls have no groups, would
/// ignore.
void refuse_hosts_options_on_cpu(const CudaHostsOptions& hosts);

/// Joins the group. Throws CLI::ValidationError where neither options nor launcher say who this
/// rank is, and what make_network_communicator() throws.
std::unique_ptr<Communicator> join_launched_group(const LaunchOptions& options);

}  // namespace megamoe::tools
