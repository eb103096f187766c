#include "device/tensor_map.h"

#include <cuda_runtime_api.h>

#include <string>

#include "megamoe/error.h"

namespace megamoe::device {
namespace {

using EncodeFunction = decltype(&cuTensorMapEncodeTiled);

// Through the runtime, so that the library does not link against the driver and loads on machines
// without one.
EncodeFunction encode_function() {
  static const EncodeFunction function = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found{};
    const cudaError_t status = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry,
                                                                12000, cudaEnableDefault, &found);
    if (status != cudaSuccess || found != cudaDriverEntryPointSuccess) {
      throw Error(ErrorCode::unsupported,
                  "the CUDA driver has no cuTensorMapEncodeTiled (12.0 or newer is needed)");
    }
    return reinterpret_cast<EncodeFunction>(entry);
  }();
  return function;
}

CUtensorMapDataType to_cuda(DType dtype) {
  if (dtype == DType::bf16) return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  if (dtype == DType::fp32) return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  throw Error(ErrorCode::unsupported, std::string("no tensor map for dtype ") + to_string(dtype));
}

}  // namespace

CUtensorMap encode_tensor_map(const TileDescription& tile, const char* what) {
  cuuint64_t sizes[4];
  cuuint64_t strides[4];
  cuuint32_t box[4];
  cuuint32_t element_strides[4] = {1, 1, 1, 1};
  if (reinterpret_cast<std::uintptr_t>(tile.data) % 16 != 0) {
    throw Error(ErrorCode::invalid_argument,
                std::string(what) + ": data must be aligned to 16 bytes");
  }
  for (int dim = 0; dim < tile.num_dims; ++dim) {
    if (tile.sizes[dim] <= 0 || tile.sizes[dim] > (std::int64_t{1} << 32)) {
      throw Error(ErrorCode::invalid_argument, std::string(what) + ": size " +
                                                   std::to_string(tile.sizes[dim]) +
                                                   " is outside [1, 2^32]");
    }
    sizes[dim] = static_cast<cuuint64_t>(tile.sizes[dim]);
    box[dim] = static_cast<cuuint32_t>(tile.box[dim]);
    if (dim == 0) continue;
    if (tile.stride_bytes[dim] % 16 != 0) {
      throw Error(ErrorCode::invalid_argument, std::string(what) + ": stride of " +
                                                   std::to_string(tile.stride_bytes[dim]) +
                                                   " bytes is not a multiple of 16");
    }
    strides[dim - 1] = static_cast<cuuint64_t>(tile.stride_bytes[dim]);
  }
  CUtensorMap map;
  // Promotion to 256 bytes: with 128 bytes the products lose a seventh (measured,
  // docs/perf_log.md).
  const CUresult status =
      encode_function()(&map, to_cuda(tile.dtype), static_cast<cuuint32_t>(tile.num_dims),
                        const_cast<void*>(tile.data), sizes, strides, box, element_strides,
                        CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                        CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    throw Error(ErrorCode::internal, std::string(what) +
                                         ": cuTensorMapEncodeTiled refused the tile, status " +
                                         std::to_string(status));
  }
  return map;
}

}  // namespace megamoe::device
