// Of CUDA what scripted_nccl.h says, in place of its library.
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "scripted_nccl.h"

namespace megamoe::scripted {

Nccl& fresh_nccl() {
  setenv("MEGAMOE_NCCL_LIBRARY", MEGAMOE_SCRIPTED_NCCL, 1);
  void* library = dlopen(MEGAMOE_SCRIPTED_NCCL, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) throw std::runtime_error(dlerror());
  Nccl& nccl = *reinterpret_cast<Nccl* (*)()>(dlsym(library, "scripted_nccl"))();
  for (Rank& rank : nccl.ranks) rank.reset();
  nccl.num_allocations = nccl.num_allocations_at_abort = 0;
  cuda().stream_is_done = cuda().has_memory = true;
  cuda().num_events_done = cuda().num_events_recorded = 0;
  cuda().unmapped = nullptr;
  return nccl;
}

Cuda& cuda() {
  static Cuda cuda;
  return cuda;
}

}  // namespace megamoe::scripted

using megamoe::scripted::Cuda;

extern "C" {

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int /*device*/) { return cudaSuccess; }
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaHostRegister(void* /*memory*/, size_t /*bytes*/, unsigned /*flags*/) {
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* /*memory*/) { return cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t /*error*/) { return "an error of the script"; }
const char* cudaGetErrorName(cudaError_t /*error*/) { return "an error of the script"; }

cudaError_t cudaMalloc(void** memory, size_t bytes) {
  if (!megamoe::scripted::cuda().has_memory) return cudaErrorMemoryAllocation;
  ++megamoe::scripted::cuda().num_allocations;
  *memory = std::malloc(bytes);
  return cudaSuccess;
}
cudaError_t cudaFree(void* memory) {
  --megamoe::scripted::cuda().num_allocations;
  std::free(memory);
  return cudaSuccess;
}
cudaError_t cudaMemset(void* memory, int value, size_t bytes) {
  std::memset(memory, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* memory) {
  const bool is_mapped = memory != megamoe::scripted::cuda().unmapped;
  attributes->type = is_mapped ? cudaMemoryTypeDevice : cudaMemoryTypeUnregistered;
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned /*flags*/) {
  *event = reinterpret_cast<cudaEvent_t>(new int{0});
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete reinterpret_cast<int*>(event);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t /*stream*/) {
  Cuda& script = megamoe::scripted::cuda();
  *reinterpret_cast<int*>(event) = script.stream_is_done ? 0 : ++script.num_events_recorded;
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  const Cuda& script = megamoe::scripted::cuda();
  const bool is_done = *reinterpret_cast<int*>(event) <= script.num_events_done;
  return is_done ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned /*flags*/) {
  *stream = nullptr;
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t /*stream*/) { return cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t /*stream*/) {
  return megamoe::scripted::cuda().stream_is_done ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaStreamSynchronize(cudaStream_t /*stream*/) { return cudaSuccess; }
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* /*mode*/) {
  return cudaSuccess;
}
}
