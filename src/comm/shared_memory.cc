#include "comm/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "megamoe/error.h"

namespace megamoe {
namespace {

[[noreturn]] void fail(const std::string& name, const char* action, int error) {
  throw Error(ErrorCode::internal, std::string("cannot ") + action + " shared memory " + name +
                                       ": " + std::strerror(error));
}

void reserve(int descriptor, const std::string& name, std::size_t bytes) {
  const auto length = static_cast<off_t>(bytes);
  const int error = posix_fallocate(descriptor, 0, length);
  if (error == 0) return;
  if (error == ENOSPC || error == ENOMEM || error == EFBIG || length < 0) {
    throw Error(ErrorCode::out_of_memory,
                "no room for " + std::to_string(bytes) + " bytes of shared memory in /dev/shm");
  }
  fail(name, "reserve", error);
}

}  // namespace

SharedMemory::SharedMemory(SharedMemory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

SharedMemory& SharedMemory::operator=(SharedMemory&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

SharedMemory::~SharedMemory() {
  if (data_ != nullptr) munmap(data_, bytes_);
}

SharedMemory SharedMemory::map(int descriptor, const std::string& name, std::size_t bytes) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (data == MAP_FAILED) fail(name, "map", errno);
  SharedMemory memory;
  memory.data_ = static_cast<std::byte*>(data);
  memory.bytes_ = bytes;
  return memory;
}

SharedMemory SharedMemory::open_or_create(const std::string& name, std::size_t bytes) {
  const int descriptor = shm_open(name.c_str(), O_RDWR | O_CREAT, S_IRUSR | S_IWUSR);
  if (descriptor < 0) fail(name, "create", errno);
  try {
    reserve(descriptor, name, bytes);
    SharedMemory memory = map(descriptor, name, bytes);
    close(descriptor);
    return memory;
  } catch (...) {
    close(descriptor);
    unlink(name);
    throw;
  }
}

SharedMemory SharedMemory::open(const std::string& name, std::size_t bytes) {
  const int descriptor = shm_open(name.c_str(), O_RDWR, 0);
  if (descriptor < 0) fail(name, "open", errno);
  try {
    SharedMemory memory = map(descriptor, name, bytes);
    close(descriptor);
    return memory;
  } catch (...) {
    close(descriptor);
    throw;
  }
}

void SharedMemory::unlink(const std::string& name) noexcept { shm_unlink(name.c_str()); }

}  // namespace megamoe
