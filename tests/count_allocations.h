// Counts the heap allocations of a test program that links count_allocations.cc.
#pragma once

#include <cstdint>

namespace megamoe::testing {

/// Calls of operator new since the program began, on all threads.
std::int64_t num_allocations();

}  // namespace megamoe::testing
