#include "device/capability.h"

namespace megamoe::device {

Capability capability_of(int major, int minor) {
  const std::string name =
      "compute capability " + std::to_string(major) + "." + std::to_string(minor);
  const std::string offer = "; use the CPU backend";
  if (major == 9 && minor == 0) {
    return {true, name + " (Hopper) has TMA and wgmma: the CUDA backend runs on it"};
  }
  if (major < 9) {
    return {
        false,
        name + " has neither TMA nor wgmma, which the kernels are made of (9.0 is needed)" + offer};
  }
  if (major == 10 || major == 11) {
    return {false,
            name + " (Blackwell) has TMA and tcgen05, for which the kernels are not written yet" +
                offer};
  }
  if (major == 12) {
    return {false,
            name + " has TMA but neither wgmma nor tcgen05, which the kernels are made of" + offer};
  }
  return {false,
          name + " is not known to this version: the kernels are built for 9.0 alone" + offer};
}

}  // namespace megamoe::device
