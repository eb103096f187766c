// The machine that the command runs on.
#pragma once

#include <string>

namespace megamoe::tools {

/// The processor's name as the system gives it; "unknown processor" where it gives none.
std::string processor_name();

/// Threads that the system runs at once; at least 1.
int num_cpu_threads();

}  // namespace megamoe::tools
