// Elementwise work on rows that the SIMD instruction set of the machine does, one fused operation
// an element: the bits are those of the plain loops.
#pragma once

#include <cstdint>

#include "megamoe/bf16.h"

namespace megamoe::cpu {

/// sums[i] = fma(weight, row[i], sums[i]) for i < count.
void add_weighted_row(float weight, const bf16* row, std::int64_t count, float* sums);

/// out[i] = to_bf16(values[i]) for i < count.
void round_row(const float* values, std::int64_t count, bf16* out);

}  // namespace megamoe::cpu
