// bfloat16 as storage: conversions to and from fp32, usable on the host and in device code.
#pragma once

#include <bit>
#include <cstdint>

#if defined(__CUDACC__)
#define MEGAMOE_HOST_DEVICE __host__ __device__
#else
#define MEGAMOE_HOST_DEVICE
#endif

namespace megamoe {

/// The upper 16 bits of an IEEE-754 binary32. Bit-compatible with torch.bfloat16 and __nv_bfloat16.
struct bf16 {
  std::uint16_t bits;
};
static_assert(sizeof(bf16) == 2);

/// Exact.
MEGAMOE_HOST_DEVICE constexpr float to_float(bf16 value) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(value.bits) << 16);
}

/// Rounds to nearest, ties to even; overflow gives infinity; NaN stays NaN (quiet, sign kept).
MEGAMOE_HOST_DEVICE constexpr bf16 to_bf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7fffffffU) > 0x7f800000U) {
    return bf16{static_cast<std::uint16_t>((bits >> 16) | 0x0040U)};
  }
  const std::uint32_t rounding_bias = 0x7fffU + ((bits >> 16) & 1U);
  return bf16{static_cast<std::uint16_t>((bits + rounding_bias) >> 16)};
}

}  // namespace megamoe
