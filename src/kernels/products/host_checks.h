// What every product checks before it launches, and the launch itself.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "kernels/products/products.h"
#include "kernels/products/tile_shape.h"

namespace megamoe::products {

inline int ceil_div(std::int64_t value, std::int64_t divisor) {
  return static_cast<int>((value + divisor - 1) / divisor);
}

/// Each throws Error naming the argument when it cannot be read or written in place.
void check_groups(const GroupedRows& rows, const char* product);
void check_rows(const ConstTensorView& view, std::int64_t num_rows, std::int64_t num_columns,
                const char* name);
void check_weights(const ConstTensorView& view, std::int64_t num_experts, std::int64_t num_rows,
                   std::int64_t num_columns, const char* name);

/// Throws unless the operand is absent, as it must be where the activation has no gate.
void check_absent(const ConstTensorView& view, const Activation& activation, const char* name);

/// Launches the kernel's clusters, of `cluster_size` CTAs, on the SMs that the options grant, as
/// many as run at once; `params` points to the kernel's parameters.
void launch_clusters(const void* kernel, std::initializer_list<void*> params,
                     const LaunchOptions& options, std::size_t shared_bytes = kSharedBytes,
                     int cluster_size = kClusterSize);

}  // namespace megamoe::products
