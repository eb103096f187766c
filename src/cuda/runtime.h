// The CUDA runtime as the host side of the backend uses it: memory and the current device as
// scopes.
#pragma once

#include <cuda_runtime_api.h>
#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "device/cuda_check.h"
#include "megamoe/error.h"

namespace megamoe::cuda {

/// Makes `device` current on this thread for a scope.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device) {
    check(cudaGetDevice(&previous_), "cudaGetDevice");
    if (previous_ != device) {
      check(cudaSetDevice(device), "device " + std::to_string(device));
      changed_ = true;
    }
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;
  ~CurrentDevice() {
    if (changed_) cudaSetDevice(previous_);
  }

 private:
  int previous_ = 0;
  bool changed_ = false;
};

/// Memory of one device.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  /// Throws Error(out_of_memory) with the size and `what`.
  DeviceMemory(int device, std::int64_t bytes, const char* what) : device_(device) {
    if (bytes == 0) return;
    const CurrentDevice current(device);
    check(cudaMalloc(reinterpret_cast<void**>(&data_), static_cast<std::size_t>(bytes)),
          "device " + std::to_string(device) + " could not allocate " + std::to_string(bytes) +
              " bytes for " + what);
  }
  DeviceMemory(DeviceMemory&& other) noexcept
      : device_(other.device_), data_(std::exchange(other.data_, nullptr)) {}
  DeviceMemory& operator=(DeviceMemory&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(data_, other.data_);
    return *this;
  }
  ~DeviceMemory() {
    if (data_ != nullptr) cudaFree(data_);
  }

  [[nodiscard]] std::byte* data() const { return data_; }

 private:
  int device_ = 0;
  std::byte* data_ = nullptr;
};

/// A stream of the current device that waits for no other; destroyed at the end of the scope.
class OwnedStream {
 public:
  OwnedStream() {
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
  }
  OwnedStream(const OwnedStream&) = delete;
  OwnedStream& operator=(const OwnedStream&) = delete;
  ~OwnedStream() { cudaStreamDestroy(stream_); }

  [[nodiscard]] cudaStream_t get() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

/// An event without times, of the current device.
class OwnedEvent {
 public:
  OwnedEvent() {
    check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "cudaEventCreate");
  }
  OwnedEvent(OwnedEvent&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}
  OwnedEvent& operator=(OwnedEvent&& other) noexcept {
    std::swap(event_, other.event_);
    return *this;
  }
  ~OwnedEvent() {
    if (event_ != nullptr) cudaEventDestroy(event_);
  }

  [[nodiscard]] cudaEvent_t get() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

/// One T in pinned host memory that every device can write; zeroed.
template <class T>
class PinnedValue {
 public:
  PinnedValue() {
    check(cudaHostAlloc(reinterpret_cast<void**>(&value_), sizeof(T),
                        cudaHostAllocMapped | cudaHostAllocPortable),
          "pinned host memory of " + std::to_string(sizeof(T)) + " bytes");
    *value_ = T{};
  }
  PinnedValue(const PinnedValue&) = delete;
  PinnedValue& operator=(const PinnedValue&) = delete;
  ~PinnedValue() { cudaFreeHost(value_); }

  [[nodiscard]] T* get() const { return value_; }

 private:
  T* value_ = nullptr;
};

/// Words of the host that every device can read; zeroed. The memory is the process's, not CUDA's: a
/// thread may write it until the process has ended, when CUDA is long taken down. It is shared with
/// forked children, so that none makes the host write to a copy.
class HostWords {
 public:
  explicit HostWords(std::size_t count) : bytes_(count * sizeof(std::uint32_t)) {
    memory_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory_ == MAP_FAILED) {
      throw Error(ErrorCode::out_of_memory, "host memory of " + std::to_string(bytes_) + " bytes");
    }
    const cudaError_t status =
        cudaHostRegister(memory_, bytes_, cudaHostRegisterMapped | cudaHostRegisterPortable);
    if (status != cudaSuccess) {
      munmap(memory_, bytes_);
      check(status, "pinned host memory of " + std::to_string(bytes_) + " bytes");
    }
  }
  HostWords(const HostWords&) = delete;
  HostWords& operator=(const HostWords&) = delete;
  ~HostWords() {
    cudaHostUnregister(memory_);
    munmap(memory_, bytes_);
  }

  [[nodiscard]] std::uint32_t* get() const { return static_cast<std::uint32_t*>(memory_); }

 private:
  std::size_t bytes_;
  void* memory_ = nullptr;
};

}  // namespace megamoe::cuda
