// Shared memory of overlapping kernels: what the products leave of an SM's 227 KB, about 9 KB.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/products/tile_shape.h"

namespace megamoe::products {

template <std::uint32_t kBytes>
inline constexpr std::uint32_t kBehind = (kBytes + 127U) / 128U * 128U;

/// Behind the last member of a product's storage, whose alignment would round its size up too far.
template <class Storage>
inline constexpr std::uint32_t kBesideStages =
    kBehind<offsetof(Storage, first_tile) + sizeof(Storage::first_tile)>;

template <class Storage, class Extra>
inline constexpr std::uint32_t kSharedBytesWith = kBesideStages<Storage> + sizeof(Extra);

template <class Storage, class Extra>
__device__ inline Extra& beside_stages(std::uint8_t* shared_bytes) {
  static_assert(alignof(Extra) <= 128);
  static_assert(kSharedBytesWith<Storage, Extra> <= 232448, "shared memory of one SM");
  return *reinterpret_cast<Extra*>(shared_bytes + kBesideStages<Storage>);
}

}  // namespace megamoe::products
