// Validation of CudaRouter's arguments as far as it needs no device; every refusal names the
// argument. Values and the place of memory are not looked at.
#pragma once

#include "megamoe/cuda_router.h"
#include "routing/router_check.h"

namespace megamoe::detail {

/// The most that the kernels take.
inline constexpr std::int64_t kMaxCudaRouterExperts = 512;
inline constexpr std::int64_t kMaxCudaRouterSlots = 16;
inline constexpr std::int64_t kMaxCudaRouterGroups = 32;

/// check_router_config(), then what the kernels do not take, as unsupported.
void check_cuda_router_config(const RouterConfig& config);

RouterCallShape check_cuda_forward(const RouterConfig& config, const RouterInputs& inputs,
                                   const RouterOutputs& outputs);
RouterCallShape check_cuda_add_load(const RouterConfig& config, const ConstTensorView& logits,
                                    const ConstTensorView& expert_ids, const TensorView& load);
void check_cuda_aux_loss(const RouterConfig& config, const ConstTensorView& global_load,
                         const TensorView& loss);
RouterCallShape check_cuda_backward(const RouterConfig& config,
                                    const CudaRouterBackwardInputs& inputs,
                                    const TensorView& d_logits);
void check_cuda_bias_update(const RouterConfig& config, const ConstTensorView& global_load,
                            float rate, const TensorView& selection_bias);

}  // namespace megamoe::detail
