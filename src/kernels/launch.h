// Launching kernels from host code.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace megamoe::gpu {

/// Throws Error(internal) naming `what` where the call or the last launch failed.
void check_cuda(cudaError_t status, const char* what);
inline void check_launch(const char* what) { check_cuda(cudaGetLastError(), what); }

/// Multiprocessors of the current device.
int num_multiprocessors();

/// Loads a kernel's code now. A first launch that loads code may wait for all running kernels: for
/// one that waits for a peer on the same GPU, too.
void load_kernel(const void* kernel);
/// Loads every kernel of the exchange; call once before the first call of a process.
void load_exchange_kernels();

}  // namespace megamoe::gpu
