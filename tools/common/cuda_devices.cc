#include <cuda_runtime_api.h>

#include "common/devices.h"
#include "device/capability.h"
#include "megamoe/config.h"
#include "megamoe/error.h"

namespace megamoe::tools {
namespace {

/// Why the layer does not run on any CUDA device, in its own words; empty where it does.
std::string layer_refusal() {
  LayerConfig config;
  config.shape = {
      .max_tokens = 64, .hidden_dim = 64, .intermediate_dim = 64, .num_experts = 1, .top_k = 1};
  config.backend = Backend::cuda;
  try {
    validate(config, 1);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

}  // namespace

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
    const std::string refusal = layer_refusal();
    result.devices.push_back(
        {"cuda", properties.name, capability.can_run && refusal.empty(),
         capability.can_run && !refusal.empty() ? refusal : capability.reason});
  }
  if (result.devices.empty()) result.note = "no device";
  return result;
}

}  // namespace megamoe::tools
