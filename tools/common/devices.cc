#include "common/devices.h"

#include "megamoe/error.h"

namespace megamoe::tools {

void require_devices_of(const std::string& backend) {
  if (backend != "cuda") return;
  const CudaDevices found = cuda_devices();
  if (!found.devices.empty()) return;
  throw Error(ErrorCode::unsupported, "backend cuda: " + found.note + "; use the cpu backend");
}

}  // namespace megamoe::tools
