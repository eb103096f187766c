#include <cuda_runtime_api.h>

#include "common/devices.h"
#include "device/capability.h"

namespace megamoe::tools {

CudaDevices cuda_devices() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess) {
    return {{}, std::string("no device can be used: ") + cudaGetErrorString(status)};
  }
  CudaDevices result;
  for (int index = 0; index < count; ++index) {
    cudaDeviceProp properties{};
    if (cudaGetDeviceProperties(&properties, index) != cudaSuccess) continue;
    const device::Capability capability = device::capability_of(properties.major, properties.minor);
    result.devices.push_back({"cuda", properties.name, capability.can_run, capability.reason});
  }
  if (result.devices.empty()) result.note = "no device";
  return result;
}

}  // namespace megamoe::tools
