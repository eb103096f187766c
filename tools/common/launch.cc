#include "common/launch.h"

#include <cstdlib>
#include <string>

namespace megamoe::tools {
namespace {

/// How a launcher tells a process its rank, and how many there are.
struct LauncherVariables {
  const char* rank;
  const char* num_ranks;
};
/// In a Slurm job its own variables are also set for processes that torchrun or mpirun start, and
/// say of each that it is rank 0: they come last.
constexpr LauncherVariables kLaunchers[] = {
    {"RANK", "WORLD_SIZE"},                            // torchrun
    {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"},  // mpirun of Open MPI
    {"PMI_RANK", "PMI_SIZE"},                          // mpirun of MPICH and Intel MPI
    {"SLURM_PROCID", "SLURM_NTASKS"},                  // srun
};

/// Empty where the environment has no such variable, or an empty one.
std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

[[noreturn]] void refuse(const std::string& option, const std::string& message) {
  throw CLI::ValidationError(option, message);
}

/// The first launcher that has set both, so that they are of the same one.
const LauncherVariables* launcher() {
  for (const LauncherVariables& names : kLaunchers) {
    if (!variable(names.rank).empty() && !variable(names.num_ranks).empty()) return &names;
  }
  return nullptr;
}

/// What `option` gave, or else the launcher's variable `name` says.
int number_of(const char* option, int given, const char* LauncherVariables::*name) {
  if (given >= 0) return given;
  const LauncherVariables* const names = launcher();
  if (names == nullptr) {
    std::string known;
    for (const LauncherVariables& other : kLaunchers) {
      known += (known.empty() ? "" : ", ") + std::string(other.*name);
    }
    refuse(option, "is needed with --launched: no launcher has set any of " + known);
  }
  int value = -1;
  const std::string text = variable(names->*name);
  if (!CLI::detail::lexical_cast(text, value)) {
    refuse(option, "the launcher's " + std::string(names->*name) + " is '" + text + "'");
  }
  return value;
}

/// torchrun itself listens at MASTER_PORT: the next port is taken.
std::string launcher_rendezvous() {
  constexpr int kLastPort = 65535;
  const std::string address = variable("MASTER_ADDR");
  const std::string text = variable("MASTER_PORT");
  if (address.empty() || text.empty()) {
    refuse("--rendezvous",
           "is needed with --launched: MASTER_ADDR and MASTER_PORT are not set (torchrun sets "
           "them, mpirun and srun do not)");
  }
  int port = 0;
  if (!CLI::detail::lexical_cast(text, port) || port < 1 || port >= kLastPort) {
    refuse("--rendezvous", "no port follows the launcher's MASTER_PORT '" + text + "'");
  }
  return address + ":" + std::to_string(port + 1);
}

}  // namespace

void add_launch_options(CLI::App& command, LaunchOptions& options) {
  CLI::Option* const launched = command.add_flag(
      "--launched", options.is_launched,
      "This process is one rank of several that a launcher started (torchrun, mpirun, "
      "srun), on one host or more");
  command
      .add_option("--rank", options.network.rank,
                  "With --launched: this rank; default RANK, OMPI_COMM_WORLD_RANK, PMI_RANK or "
                  "SLURM_PROCID")
      ->default_str("")
      ->needs(launched)
      ->check(CLI::Range(0, 255));
  command
      .add_option(
          "--world-size", options.network.num_ranks,
          "With --launched: all ranks; default WORLD_SIZE, OMPI_COMM_WORLD_SIZE, PMI_SIZE or "
          "SLURM_NTASKS")
      ->default_str("")
      ->needs(launched)
      ->check(CLI::Range(1, 256));
  command
      .add_option("--rendezvous", options.network.rendezvous,
                  "With --launched: ADDRESS:PORT of rank 0's host, for all ranks the same; default "
                  "MASTER_ADDR and the port after MASTER_PORT")
      ->default_str("")
      ->needs(launched);
  command
      .add_option("--host-name", options.network.host_name,
                  "With --launched: ranks with equal names share memory; default: the machine, and "
                  "NCCL_HOSTID where that is set")
      ->default_str("")
      ->needs(launched);
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
  network.rank = number_of("--rank", network.rank, &LauncherVariables::rank);
  network.num_ranks = number_of("--world-size", network.num_ranks, &LauncherVariables::num_ranks);
  if (network.rendezvous.empty()) network.rendezvous = launcher_rendezvous();
  return make_network_communicator(network, options.deadline_s);
}

}  // namespace megamoe::tools
