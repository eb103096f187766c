// What the launch of the weight gradients needs, once its arguments are checked: for the kernel
// that does nothing else, and for the one beside which rows travel (kernels/forward/).
#pragma once

#include "kernels/products/products.h"
#include "kernels/weight_gradients/weight_gradient.h"

namespace megamoe::products {

const void* weight_gradient_fp32_sharing_both();
const void* weight_gradients_beside_rows_fp32_sharing_both();
inline constexpr Sharing kSharingBoth = static_cast<Sharing>(3);

struct WeightGradientLaunch {
  WeightGradientParams params{};
  GradientType type = GradientType::bf16;
  Sharing sharing = Sharing::rows;  ///< never automatic
};

/// Arguments as those of multiply_weight_gradients(). No job is early.
WeightGradientLaunch describe_weight_gradients(const GroupedRows& rows,
                                               std::span<const WeightGradient> gradients,
                                               GradientMode mode, const LaunchOptions& options,
                                               const std::uint32_t* cancelled);

}  // namespace megamoe::products
