// `megamoe info`: what this machine can run, and why not.
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "commands/commands.h"
#include "common/build_info.h"
#include "common/devices.h"
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

}  // namespace

void add_info_command(CLI::App& app) {
  CLI::App* command = app.add_subcommand("info", "Show devices, what each can run and why not");
  const auto as_json = std::make_shared<bool>(false);
  command->add_flag("--json", *as_json, "Print JSON in place of text");
  command->callback([as_json] { *as_json ? print_json() : print_text(); });
}

}  // namespace megamoe::tools
