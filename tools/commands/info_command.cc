// `megamoe info`: what this machine can run, and why not.
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "commands/commands.h"
#include "common/build_info.h"
#include "common/devices.h"
#include "common/launch.h"
#include "common/machine.h"
#include "cpu/fma_peak.h"

namespace megamoe::tools {
namespace {

std::vector<Device> all_devices(const CudaDevices& cuda) {
  std::vector<Device> devices = {cpu_device()};
  devices.insert(devices.end(), cuda.devices.begin(), cuda.devices.end());
  return devices;
}

void print_text() {
  const CudaDevices cuda = cuda_devices();
  const BuildInfo build = build_info();
  std::printf("megamoe %s, commit %s, %s, %s build\n", build.version.c_str(), build.commit.c_str(),
              build.compiler.c_str(), build.build_type.c_str());
  for (const Device& device : all_devices(cuda)) {
    std::printf("%-5s %s\n      %s: %s\n", device.backend.c_str(), device.name.c_str(),
                device.can_run ? "can run" : "cannot run", device.detail.c_str());
  }
  if (!cuda.note.empty()) std::printf("%-5s %s\n", "cuda", cuda.note.c_str());
}

void print_json() {
  const CudaDevices cuda = cuda_devices();
  const BuildInfo build = build_info();
  nlohmann::ordered_json devices = nlohmann::ordered_json::array();
  for (const Device& device : all_devices(cuda)) {
    devices.push_back({{"backend", device.backend},
                       {"name", device.name},
                       {"can_run", device.can_run},
                       {"detail", device.detail}});
  }
  const nlohmann::ordered_json info = {
      {"version", build.version},         {"commit", build.commit},
      {"compiler", build.compiler},       {"build_type", build.build_type},
      {"cpu_threads", num_cpu_threads()}, {"simd", cpu::simd_target_name()},
      {"cuda_note", cuda.note},           {"devices", devices}};
  std::printf("%s\n", info.dump(2).c_str());
}

struct InfoOptions {
  bool as_json = false;
  LaunchOptions launch;
};

/// Of a launched group, which rank 0 prints for all.
void print_group(const InfoOptions& options) {
  const std::unique_ptr<Communicator> group = join_launched_group(options.launch);
  const Topology topology = group->topology();
  if (group->rank() == 0) {
    const int num_ranks = topology.num_ranks();
    nlohmann::ordered_json ranks = nlohmann::ordered_json::array();
    for (int rank = 0; rank < num_ranks; ++rank) {
      nlohmann::ordered_json reach = nlohmann::ordered_json::array();
      for (int peer = 0; peer < num_ranks; ++peer)
        reach.push_back(to_string(topology.reach(rank, peer)));
      ranks.push_back({{"rank", rank},
                       {"host", topology.host_name(topology.host_of(rank))},
                       {"reaches_by", reach}});
    }
    const std::string text =
        options.as_json ? nlohmann::ordered_json({{"ranks", ranks}}).dump(2) : topology.describe();
    std::printf("%s\n", text.c_str());
  }
  group->barrier("the end of megamoe info", options.launch.deadline_s);
}

void run_info(const InfoOptions& options) {
  if (options.launch.is_launched) return print_group(options);
  options.as_json ? print_json() : print_text();
}

}  // namespace

void add_info_command(CLI::App& app) {
  CLI::App* command = app.add_subcommand(
      "info", "Show devices, what each can run and why not; with --launched who reaches whom how");
  const auto options = std::make_shared<InfoOptions>();
  command->add_flag("--json", options->as_json, "Print JSON in place of text");
  add_launch_options(*command, options->launch);
  command->callback([options] { run_info(*options); });
}

}  // namespace megamoe::tools
