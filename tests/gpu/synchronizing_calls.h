// Counts the calls of CUDA's runtime on which the host waits for a device, or may wait. The linker
// puts functions that count in their place (--wrap, CMakeLists.txt).
#pragma once

#include <cstdint>

namespace megamoe::verify {

/// By all threads, since the process began: synchronisations, questions whether a device is done,
/// copies, memory that is allocated or freed.
std::int64_t num_synchronizing_calls();

}  // namespace megamoe::verify
