// Shared memory of overlapping kernels: what the products leave of an SM's 227 KB, 8 KB and a bit.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/products/tile_shape.h"

namespace megamoe::products {

/// Behind the last member of SharedStorage, whose alignment would round its size up too far.
inline constexpr std::uint32_t kBesideStages =
    (offsetof(SharedStorage, first_tile) + sizeof(SharedStorage::first_tile) + 127U) / 128U * 128U;

template <class Extra>
inline constexpr std::uint32_t kSharedBytesWith = kBesideStages + sizeof(Extra);

template <class Extra>
__device__ inline Extra& beside_stages(std::uint8_t* shared_bytes) {
  static_assert(alignof(Extra) <= 128);
  static_assert(kSharedBytesWith<Extra> <= 232448, "shared memory of one SM");
  return *reinterpret_cast<Extra*>(shared_bytes + kBesideStages);
}

}  // namespace megamoe::products
