#include "gpu/synchronizing_calls.h"

#include <cuda_runtime_api.h>

#include <atomic>

namespace {

std::atomic<std::int64_t> num_calls = 0;

}  // namespace

// NOLINTBEGIN(bugprone-reserved-identifier): the linker's names.
#define MEGAMOE_COUNTED(name, parameters, arguments) \
  extern "C" cudaError_t __real_##name parameters;   \
  extern "C" cudaError_t __wrap_##name parameters;   \
  extern "C" cudaError_t __wrap_##name parameters {  \
    num_calls.fetch_add(1);                          \
    return __real_##name arguments;                  \
  }
MEGAMOE_COUNTED(cudaDeviceSynchronize, (), ())
MEGAMOE_COUNTED(cudaStreamSynchronize, (cudaStream_t stream), (stream))
MEGAMOE_COUNTED(cudaEventSynchronize, (cudaEvent_t event), (event))
MEGAMOE_COUNTED(cudaMemcpy, (void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind),
                (to, from, bytes, kind))
MEGAMOE_COUNTED(cudaMemcpyAsync,
                (void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind,
                 cudaStream_t stream),
                (to, from, bytes, kind, stream))
MEGAMOE_COUNTED(cudaMalloc, (void** memory, std::size_t bytes), (memory, bytes))
MEGAMOE_COUNTED(cudaFree, (void* memory), (memory))
MEGAMOE_COUNTED(cudaHostAlloc, (void** memory, std::size_t bytes, unsigned int flags),
                (memory, bytes, flags))
MEGAMOE_COUNTED(cudaFreeHost, (void* memory), (memory))
MEGAMOE_COUNTED(cudaStreamQuery, (cudaStream_t stream), (stream))
MEGAMOE_COUNTED(cudaEventQuery, (cudaEvent_t event), (event))
#undef MEGAMOE_COUNTED
// NOLINTEND(bugprone-reserved-identifier)

namespace megamoe::verify {

std::int64_t num_synchronizing_calls() { return num_calls.load(); }

}  // namespace megamoe::verify
