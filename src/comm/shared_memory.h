// A POSIX shared-memory segment of this host, mapped.
#pragma once

#include <cstddef>
#include <string>

namespace megamoe {

class SharedMemory {
 public:
  SharedMemory() = default;
  SharedMemory(SharedMemory&& other) noexcept;
  SharedMemory& operator=(SharedMemory&& other) noexcept;
  ~SharedMemory();

  /// Opens the segment, or makes it: zeroed, `bytes` long, its memory reserved at once so that a
  /// full /dev/shm is an error here and not a SIGBUS later. Throws Error(out_of_memory) with the
  /// size, or Error(internal) with the system's reason.
  static SharedMemory open_or_create(const std::string& name, std::size_t bytes);
  /// Opens a segment that a peer made. Throws Error(internal).
  static SharedMemory open(const std::string& name, std::size_t bytes);
  /// Removes the name; mappings stay. A name that does not exist is no error.
  static void unlink(const std::string& name) noexcept;

  [[nodiscard]] std::byte* data() const { return data_; }
  [[nodiscard]] std::size_t bytes() const { return bytes_; }

 private:
  static SharedMemory map(int descriptor, const std::string& name, std::size_t bytes);
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace megamoe
