#include "common/devices.h"
#include "common/machine.h"
#include "cpu/fma_peak.h"

namespace megamoe::tools {

Device cpu_device() {
  return {"cpu", processor_name(), true,
          std::to_string(num_cpu_threads()) + " threads, SIMD " + cpu::simd_target_name() +
              "; runs forward and backward"};
}

}  // namespace megamoe::tools
