// The router's forward pass on the device, from logits. Host interface; runs on `stream`.
//
// Selection, weights and the order of their sums are those of routing/router_*.h; exp is the
// device's, so scores may differ from the CPU's in the last places, and ids where scores are that
// close. Equal logits are equal scores: ties go to the lower id on both.
//
// Legend: T tokens, E experts, K slots.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "megamoe/router.h"

namespace megamoe::gpu {

struct RouterTensors {
  const float* logits_TE = nullptr;
  std::int64_t logit_stride = 0;
  const float* selection_bias_E = nullptr;  ///< or null
  std::int32_t* ids_TK = nullptr;
  std::int64_t id_stride = 0;
  float* weights_TK = nullptr;
  std::int64_t weight_stride = 0;
  float* scores_TE = nullptr;  ///< dense, for the backward pass; or null
  float* shares_TK = nullptr;  ///< dense, for the backward pass; or null
  /// The lowest token whose logits are not all finite, by atomicMin; such tokens get empty slots.
  unsigned long long* first_bad_token = nullptr;
};

/// Throws Error(unsupported) for more experts or slots than the kernels take. Nothing runs when
/// num_tokens is 0.
void route(const RouterConfig& config, const RouterTensors& tensors, std::int64_t num_tokens,
           cudaStream_t stream);

}  // namespace megamoe::gpu
