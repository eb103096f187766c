// A ring whose uses two warpgroups share in turns.
#pragma once

#include <cstdint>

#include "megamoe/bf16.h"  // MEGAMOE_HOST_DEVICE

namespace megamoe::products {

/// A position in the ring of `kDepth` buffers that a warpgroup shares with the other, whose uses it
/// skips.
template <int kDepth>
struct SharedRing {
  std::uint32_t slot = 0;
  std::uint32_t parity = 0;

  MEGAMOE_HOST_DEVICE void advance() { skip(1); }
  MEGAMOE_HOST_DEVICE void skip(int count) {
    const std::uint32_t passed = parity * kDepth + slot + static_cast<std::uint32_t>(count);
    slot = passed % kDepth;
    parity = passed / kDepth & 1U;
  }
};

}  // namespace megamoe::products
