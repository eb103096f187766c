// `megamoe info`: what this machine can run, and why not.
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "commands/commands.h"
#include "common/build_info.h"
#include "common/machine.h"
#include "cpu/fma_peak.h"

namespace megamoe::tools {
namespace {

struct Device {
  std::string backend;  ///< "cpu" or "cuda"
  std::string name;
  bool can_run;
  std::string detail;  ///< what it runs, or why it cannot
};

std::vector<Device> list_devices() {
  std::vector<Device> devices;
  devices.push_back({"cpu", processor_name(), true,
                     std::to_string(num_cpu_threads()) + " threads, SIMD " +
                         cpu::simd_target_name() + "; runs forward and backward"});
  return devices;
}

/// Why there is no CUDA device in the list.
const char* cuda_note() { return "not built; configure with the preset \"cuda\" (needs nvcc 13)"; }

void print_text() {
  const BuildInfo build = build_info();
  std::printf("megamoe %s, commit %s, %s, %s build\n", build.version.c_str(), build.commit.c_str(),
              build.compiler.c_str(), build.build_type.c_str());
  for (const Device& device : list_devices()) {
    std::printf("%-5s %s\n      %s: %s\n", device.backend.c_str(), device.name.c_str(),
                device.can_run ? "can run" : "cannot run", device.detail.c_str());
  }
  std::printf("%-5s %s\n", "cuda", cuda_note());
}

void print_json() {
  const BuildInfo build = build_info();
  nlohmann::ordered_json devices = nlohmann::ordered_json::array();
  for (const Device& device : list_devices()) {
    devices.push_back({{"backend", device.backend},
                       {"name", device.name},
                       {"can_run", device.can_run},
                       {"detail", device.detail}});
  }
  const nlohmann::ordered_json info = {{"version", build.version},
                                       {"commit", build.commit},
                                       {"compiler", build.compiler},
                                       {"build_type", build.build_type},
                                       {"cpu_threads", num_cpu_threads()},
                                       {"simd", cpu::simd_target_name()},
                                       {"cuda", cuda_note()},
                                       {"devices", devices}};
  std::printf("%s\n", info.dump(2).c_str());
}

}  // namespace

void add_info_command(CLI::App& app) {
  CLI::App* command = app.add_subcommand("info", "Show devices, what each can run and why not");
  const auto as_json = std::make_shared<bool>(false);
  command->add_flag("--json", *as_json, "Print JSON in place of text");
  command->callback([as_json] { *as_json ? print_json() : print_text(); });
}

}  // namespace megamoe::tools
