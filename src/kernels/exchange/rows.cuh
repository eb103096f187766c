// Rows as warps move them: in chunks of up to 4 KB, a chunk at a time through the registers of a
// warp, 16 bytes a lane and access.
#pragma once

#include <cstdint>

#include "device/cluster.cuh"
#include "megamoe/bf16.h"

namespace megamoe::gpu {

using Vector = uint4;
inline constexpr int kVectorElements = sizeof(Vector) / sizeof(bf16);
/// Loads of a lane before its first store.
inline constexpr int kVectorsALane = 8;
inline constexpr int kMaxChunkVectors = kVectorsALane * device::kWarpSize;

inline constexpr int kMoverThreads = 256;
inline constexpr int kMoverWarps = kMoverThreads / device::kWarpSize;
/// Blocks of kMoverThreads that an SM holds: enough bytes in flight for memory and for NVLink.
inline constexpr int kMoverBlocksAnSm = 4;

/// A row cut into chunks of nearly equal size.
struct RowCut {
  std::int32_t num_vectors;  ///< of a row
  std::int32_t num_chunks;
  std::int32_t chunk_vectors;  ///< of every chunk but perhaps the last

  explicit RowCut(std::int64_t hidden)
      : num_vectors(static_cast<std::int32_t>(hidden / kVectorElements)),
        num_chunks((num_vectors + kMaxChunkVectors - 1) / kMaxChunkVectors) {
    const int even = (num_vectors + num_chunks - 1) / num_chunks;
    chunk_vectors = (even + device::kWarpSize - 1) / device::kWarpSize * device::kWarpSize;
  }
};

__device__ inline int global_warp() {
  return static_cast<int>(blockIdx.x) * static_cast<int>(blockDim.x / device::kWarpSize) +
         device::warp_idx();
}
__device__ inline int num_global_warps() {
  return static_cast<int>(gridDim.x * (blockDim.x / device::kWarpSize));
}

/// A plain load (peers write what is read here, so never the read-only path) that leaves the L1
/// alone.
__device__ inline Vector load_once(const Vector* address) {
  Vector v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address)
               : "memory");
  return v;
}

/// What one warp holds of a row.
struct ChunkInRegisters {
  Vector vectors[kVectorsALane];
};

/// Calls body(register idx, vector idx in the row) for this lane's vectors of chunk `chunk`.
template <class Body>
__device__ void for_each_vector(const RowCut& cut, int chunk, Body body) {
  const int begin = chunk * cut.chunk_vectors;
  const int end = min(begin + cut.chunk_vectors, cut.num_vectors);
#pragma unroll
  for (int i = 0; i < kVectorsALane; ++i) {
    const int vector = begin + i * device::kWarpSize + device::lane_idx();
    if (vector < end) body(i, vector);
  }
}

__device__ inline const Vector* row_of(const bf16* rows, std::int64_t row, std::int64_t stride) {
  return reinterpret_cast<const Vector*>(rows + row * stride);
}
__device__ inline Vector* row_of(bf16* rows, std::int64_t row, std::int64_t stride) {
  return reinterpret_cast<Vector*>(rows + row * stride);
}

__device__ inline void load_chunk(const RowCut& cut, int chunk, const Vector* row,
                                  ChunkInRegisters& registers) {
  for_each_vector(cut, chunk,
                  [&](int i, int vector) { registers.vectors[i] = load_once(row + vector); });
}
__device__ inline void store_chunk(const RowCut& cut, int chunk, const ChunkInRegisters& registers,
                                   Vector* row) {
  for_each_vector(cut, chunk, [&](int i, int vector) { row[vector] = registers.vectors[i]; });
}

}  // namespace megamoe::gpu
