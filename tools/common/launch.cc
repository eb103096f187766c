#include "common/launch.h"

#include <cstdlib>
#include <initializer_list>
#include <optional>

namespace megamoe::tools {
namespace {

/// The first of these variables of the environment that is set.
std::optional<std::string> first_set(std::initializer_list<const char*> names) {
  for (const char* name : names) {
    const char* value = std::getenv(name);
    if (value != nullptr && *value != '\0') return value;
  }
  return std::nullopt;
}

[[noreturn]] void refuse(const std::string& option, const std::string& message) {
  throw CLI::ValidationError(option, message);
}

int number_of(const std::string& option, int given, std::initializer_list<const char*> names) {
  if (given >= 0) return given;
  const std::optional<std::string> text = first_set(names);
  if (!text)
    refuse(option, "is needed with --launched: no launcher has set " + std::string(*names.begin()));
  int value = -1;
  if (!CLI::detail::lexical_cast(*text, value)) refuse(option, "the launcher says '" + *text + "'");
  return value;
}

/// torchrun itself listens at MASTER_PORT: the next port is taken.
std::string launcher_rendezvous() {
  const std::optional<std::string> address = first_set({"MASTER_ADDR"});
  const std::optional<std::string> port = first_set({"MASTER_PORT"});
  int number = 0;
  if (!address || !port || !CLI::detail::lexical_cast(*port, number)) {
    refuse("--rendezvous",
           "is needed with --launched: no launcher has set MASTER_ADDR and MASTER_PORT");
  }
  return *address + ":" + std::to_string(number + 1);
}

}  // namespace

void add_launch_options(CLI::App& command, LaunchOptions& options) {
  command.add_flag("--launched", options.is_launched,
                   "This process is one rank of several that a launcher started (torchrun, mpirun, "
                   "srun), on one host or more");
  command
      .add_option("--rank", options.network.rank,
                  "With --launched: this rank; default RANK, OMPI_COMM_WORLD_RANK or SLURM_PROCID")
      ->default_str("")
      ->check(CLI::Range(0, 255));
  command
      .add_option("--world-size", options.network.num_ranks,
                  "With --launched: all ranks; default WORLD_SIZE, OMPI_COMM_WORLD_SIZE or "
                  "SLURM_NTASKS")
      ->default_str("")
      ->check(CLI::Range(1, 256));
  command
      .add_option("--rendezvous", options.network.rendezvous,
                  "With --launched: ADDRESS:PORT of rank 0's host, for all ranks the same; default "
                  "MASTER_ADDR and the port after MASTER_PORT")
      ->default_str("");
  command
      .add_option("--host-name", options.network.host_name,
                  "With --launched: ranks with equal names share memory; default: the machine")
      ->default_str("");
}

void add_hosts_options(CLI::App& command, CudaHostsOptions& hosts) {
  command
      .add_option(
          "--network-groups", hosts.network_groups,
          "On several hosts, cuda: groups of experts, of which one is computed while others "
          "travel; 0: as a cost model suggests")
      ->check(CLI::Range(0, CudaHostsOptions::kMostGroups))
      ->capture_default_str();
  command
      .add_option("--network-ctas", hosts.network_ctas,
                  "On several hosts, cuda: CTAs, and with them multiprocessors, of transfers "
                  "between hosts; 0: the default, 8")
      ->check(CLI::Range(0, CudaHostsOptions::kMostCtas))
      ->capture_default_str();
}

void refuse_hosts_options_on_cpu(const CudaHostsOptions& hosts) {
  const char* const why = "says how calls run on GPUs: --backend cuda";
  if (hosts.network_groups != 0) refuse("--network-groups", why);
  if (hosts.network_ctas != 0) refuse("--network-ctas", why);
}

std::unique_ptr<Communicator> join_launched_group(const LaunchOptions& options) {
  NetworkOptions network = options.network;
  network.rank =
      number_of("--rank", network.rank, {"RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"});
  network.num_ranks = number_of("--world-size", network.num_ranks,
                                {"WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS"});
  if (network.rendezvous.empty()) network.rendezvous = launcher_rendezvous();
  return make_network_communicator(network, options.deadline_s);
}

}  // namespace megamoe::tools
