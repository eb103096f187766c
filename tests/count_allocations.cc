// The operators live in a file of their own: g++ would inline them into callers and then take
// malloc and operator delete for a mismatched pair.
#include "count_allocations.h"

#include <atomic>
#include <cstdlib>
#include <limits>
#include <new>

namespace {
std::atomic<std::int64_t> allocations{0};
thread_local std::size_t refused_from = std::numeric_limits<std::size_t>::max();

void count(std::size_t bytes) {
  ++allocations;
  if (bytes >= refused_from) throw std::bad_alloc();
}
}  // namespace

void* operator new(std::size_t bytes) {
  count(bytes);
  if (void* memory = std::malloc(bytes == 0 ? 1 : bytes)) return memory;
  throw std::bad_alloc();
}
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  count(bytes);
  const auto step = static_cast<std::size_t>(alignment);
  const std::size_t rounded = (bytes + step - 1) / step * step;
  if (void* memory = std::aligned_alloc(step, rounded == 0 ? step : rounded)) return memory;
  throw std::bad_alloc();
}
// The standard library's own nothrow forms call the ones above; those of AddressSanitizer do not.
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  ++allocations;
  return std::malloc(bytes == 0 ? 1 : bytes);
}
void* operator new(std::size_t bytes, std::align_val_t alignment, const std::nothrow_t&) noexcept {
  try {
    return operator new(bytes, alignment);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace megamoe::testing {

std::int64_t num_allocations() { return allocations; }

NoMemoryFrom::NoMemoryFrom(std::size_t bytes) { refused_from = bytes; }
NoMemoryFrom::~NoMemoryFrom() { refused_from = std::numeric_limits<std::size_t>::max(); }

}  // namespace megamoe::testing
