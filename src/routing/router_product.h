// The router's three matrix products in fp32. Every element of a result is one chain of fused
// multiply-adds in increasing order, from 0: logits over H, d_x over E, d_router_weight over T.
#pragma once

#include <cstdint>

#include "megamoe/router.h"

namespace megamoe::detail {

/// Writes router_weight [E, H], fp32 or bf16, as fp32 [H, E].
void transpose_router_weight(const ConstTensorView& router_weight, float* router_weight_HE);

/// logits_TE = x router_weight^T, contiguous. x is [T, H] bf16.
void logits_product(const ConstTensorView& x, const float* router_weight_HE,
                    std::int64_t num_experts, float* logits_TE);

/// d_x [T, H] = d_logits router_weight. row_H is scratch. Experts whose d_logit is 0 are skipped.
void d_x_product(const ConstTensorView& d_logits, const ConstTensorView& router_weight,
                 GradWrite write, float* row_H, const TensorView& d_x);

/// d_router_weight [E, H] = d_logits^T x. row_H is scratch. Tokens whose d_logit is 0 are skipped.
void d_router_weight_product(const ConstTensorView& d_logits, const ConstTensorView& x,
                             GradWrite write, float* row_H, const TensorView& d_router_weight);

}  // namespace megamoe::detail
