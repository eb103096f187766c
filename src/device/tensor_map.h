// Tensor maps: the host-side description of a global-memory tile that the copy engine reads or
// writes.
#pragma once

#include <cuda.h>

#include <array>
#include <cstdint>

#include "megamoe/tensor.h"

namespace megamoe::device {

/// Up to four dimensions, innermost first. Strides are in bytes, of dimensions 1 and up; the
/// innermost is contiguous. The box is what one copy moves; its innermost extent is 128 bytes and
/// lands in shared memory with 128-byte swizzle.
struct TileDescription {
  const void* data = nullptr;
  DType dtype = DType::bf16;
  int num_dims = 0;
  std::array<std::int64_t, 4> sizes{};
  std::array<std::int64_t, 4> stride_bytes{};
  std::array<std::int32_t, 4> box{};

  bool operator==(const TileDescription&) const = default;
};

/// Throws Error naming `what` when the hardware cannot express the tile (16-byte aligned base and
/// strides, sizes below 2^32).
CUtensorMap encode_tensor_map(const TileDescription& tile, const char* what);

}  // namespace megamoe::device
