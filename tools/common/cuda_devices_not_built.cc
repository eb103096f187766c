#include "common/devices.h"

namespace megamoe::tools {

CudaDevices cuda_devices() {
  return {{}, "not built; configure with the preset \"cuda\" (needs nvcc 13)"};
}

}  // namespace megamoe::tools
