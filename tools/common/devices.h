// The devices of this machine, and what each can run.
#pragma once

#include <string>
#include <vector>

namespace megamoe::tools {

struct Device {
  std::string backend;  ///< "cpu" or "cuda"
  std::string name;
  bool can_run;
  std::string detail;  ///< what it runs, or why it cannot
};

struct CudaDevices {
  std::vector<Device> devices;
  std::string note;  ///< why there are none; empty where there are
};

Device cpu_device();

/// Defined twice: in cuda_devices.cc, and in cuda_devices_not_built.cc for builds without CUDA.
CudaDevices cuda_devices();

/// Throws Error(unsupported) where the backend "cuda" has no device, saying why: for commands,
/// before they print or measure anything.
void require_devices_of(const std::string& backend);

}  // namespace megamoe::tools
