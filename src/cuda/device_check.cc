#include "cuda/device_check.h"

#include <string>

#include "cuda/runtime.h"
#include "device/capability.h"
#include "megamoe/cuda.h"

namespace megamoe::cuda {

cudaDeviceProp require_device(int device) {
  const int count = num_cuda_devices();
  if (device < 0 || device >= count) {
    throw Error(ErrorCode::invalid_argument, "device is " + std::to_string(device) +
                                                 "; this process sees " + std::to_string(count) +
                                                 " CUDA devices");
  }
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
  const device::Capability capability = device::capability_of(properties.major, properties.minor);
  if (!capability.can_run) {
    throw Error(ErrorCode::unsupported, "device " + std::to_string(device) + " (" +
                                            properties.name + "): " + capability.reason);
  }
  return properties;
}

bool has_no_elements(const ConstTensorView& tensor) {
  for (int dim = 0; dim < tensor.num_dims; ++dim) {
    if (tensor.sizes[dim] == 0) return true;
  }
  return tensor.absent();
}

void check_memory(int device, const ConstTensorView& tensor, const char* name, const char* user) {
  if (has_no_elements(tensor)) return;
  cudaPointerAttributes attributes{};
  check(cudaPointerGetAttributes(&attributes, tensor.data), name);
  if (attributes.type == cudaMemoryTypeManaged) return;
  const auto refuse = [&](const std::string& place) {
    throw Error(ErrorCode::invalid_argument, std::string(name) + " lies " + place + "; " + user +
                                                 " is on device " + std::to_string(device));
  };
  if (attributes.type != cudaMemoryTypeDevice) refuse("in host memory");
  if (attributes.device != device) refuse("on device " + std::to_string(attributes.device));
}

}  // namespace megamoe::cuda
