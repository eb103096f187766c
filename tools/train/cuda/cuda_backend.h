// The trainer's backend on a GPU: products by cuBLAS, the rest by small kernels, on one stream.
//
// Without CUDA types: defined twice, in cuda_backend.cc and, for builds without CUDA, in
// not_built.cc.
#pragma once

#include <memory>

#include "train/backend.h"

namespace megamoe::trainer {

/// Throws Error (unsupported) naming what is missing: CUDA in the build, a device that can run the
/// layer, or cuBLAS.
void require_cuda_backend();

/// Ranks have a device each, or all share the first where there are too few. Collective.
std::unique_ptr<TrainBackend> make_cuda_backend(Communicator& host_group);

}  // namespace megamoe::trainer
