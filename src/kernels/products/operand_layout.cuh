// How a product's loads lay its operands out in a stage, for the descriptors that wgmma reads them
// through.
#pragma once

#include <cstdint>

#include "device/wgmma.cuh"
#include "kernels/products/row_product.h"

namespace megamoe::products {

static_assert(kBlockChannels == device::kWgmmaM && kKStepsPerBlock * device::kWgmmaK == kBlockK);

/// Where wgmma finds its operands within a stage; filled in per product from how its loads lay them
/// out.
struct OperandLayout {
  device::Major channel_major;
  device::Major row_major;
  std::uint32_t warpgroup_bytes;  ///< from the first to the second warpgroup's channels
  std::uint32_t block_bytes;      ///< from a warpgroup's first to its second block of 64 channels
  std::uint32_t channel_k_half_bytes;  ///< from K 0..31 to K 32..63 of the channel operand
  std::uint32_t row_k_half_bytes;      ///< the same for the row operand
  std::uint32_t row_atom_bytes;        ///< between 64-row atoms of a Major::mn row operand
};

constexpr std::uint32_t k_offset(device::Major major, std::uint32_t half_bytes, int k_step) {
  return static_cast<std::uint32_t>(k_step / 2) * half_bytes +
         static_cast<std::uint32_t>(k_step % 2) * device::k_step_bytes(major);
}

template <RowProduct kProduct, Shared kShared>
constexpr OperandLayout operand_layout() {
  constexpr std::uint32_t kBlockBytes = kBlockChannels * kBlockK * 2;
  if constexpr (kProduct == RowProduct::dx) {
    // Weights are [K, channels]: four sub-tiles of 64 channels, or two halves along K of four such
    // sub-tiles each.
    constexpr std::uint32_t kSubTile = kShared == Shared::rows ? kBlockBytes : kBlockBytes / 2;
    constexpr std::uint32_t kHalf = kShared == Shared::rows ? kBlockBytes / 2 : kChannelBytes / 2;
    return {device::Major::mn,
            device::Major::k,
            2 * kSubTile,
            kSubTile,
            kHalf,
            2 * device::k_step_bytes(device::Major::k),
            16};
  } else if constexpr (kIsGateUp<kProduct>) {
    return {device::Major::k,
            device::Major::k,
            kBlockBytes,
            kChannelBytes / 2,
            2 * device::k_step_bytes(device::Major::k),
            2 * device::k_step_bytes(device::Major::k),
            16};
  } else {
    return {device::Major::k,
            device::Major::k,
            2 * kBlockBytes,
            kBlockBytes,
            2 * device::k_step_bytes(device::Major::k),
            2 * device::k_step_bytes(device::Major::k),
            16};
  }
}

}  // namespace megamoe::products
