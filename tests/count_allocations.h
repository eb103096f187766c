// Counts the heap allocations of a test program that links count_allocations.cc.
#pragma once

#include <cstddef>
#include <cstdint>

namespace megamoe::testing {

/// Calls of operator new since the program began, on all threads.
std::int64_t num_allocations();

/// While it lives, operator new on this thread finds no memory for `bytes` or more.
class NoMemoryFrom {
 public:
  explicit NoMemoryFrom(std::size_t bytes);
  NoMemoryFrom(const NoMemoryFrom&) = delete;
  NoMemoryFrom& operator=(const NoMemoryFrom&) = delete;
  ~NoMemoryFrom();
};

}  // namespace megamoe::testing
