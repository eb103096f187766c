// What the launch of the weight gradients needs, once its arguments are checked: for the kernel
// that does nothing else, and for the one beside which rows travel (kernels/forward/).
#pragma once

#include "kernels/products/products.h"
#include "kernels/weight_gradients/weight_gradient.h"

namespace megamoe::products {

struct WeightGradientLaunch {
  WeightGradientParams params{};
  GradientType type = GradientType::bf16;
  GradientShared shared = GradientShared::lines;
};

/// CTAs of a cluster.
int cluster_size(GradientShared shared);

/// Arguments as those of multiply_weight_gradients(). No job is early.
WeightGradientLaunch describe_weight_gradients(const GroupedRows& rows,
                                               std::span<const WeightGradient> gradients,
                                               GradientMode mode, const LaunchOptions& options,
                                               const std::uint32_t* cancelled);

}  // namespace megamoe::products
