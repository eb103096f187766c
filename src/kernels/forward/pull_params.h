// What a product that pulls is to pull.
#pragma once

#include <cstdint>

#include "comm/gpu_workspace_layout.h"
#include "megamoe/bf16.h"

namespace megamoe::gpu {

/// Most bytes of a row in one chunk, of which two are in flight: what every product leaves of
/// shared memory. With two chunks of 4 KB an SM NVLink carries 328 GB/s, with one 293. Four of 2 KB
/// were slower (docs/overlap.md).
inline constexpr std::uint32_t kPullChunkBytes = 4096;
inline constexpr int kPullVectorBytes = 16;

/// Which of a source's staged rows go where.
struct PullPass {
  std::int64_t staged_offset = 0;  ///< in the source's symmetric memory
  bf16* rows_CH = nullptr;
};

/// Whether the last pass is made where the weight gradients can make it: where split_groups() has
/// left them their pulls.
enum class LastPass : std::int32_t { now, by_weight_gradients };

/// All pulls of the first pass come before those of the second. Only the first is counted: a tile
/// of the same kernel may wait for it, the second is complete at the kernel's end. Of a product,
/// rows are counted too; weight gradients wait for all rows together.
struct PullParams {
  PulledBy by = PulledBy::product;
  PullPass passes[2];
  std::int32_t num_passes = 0;
  LastPass last_pass = LastPass::now;
  std::int32_t num_vectors = 0;    ///< of a row
  std::int32_t chunk_vectors = 0;  ///< of every chunk but perhaps the last
};

}  // namespace megamoe::gpu
