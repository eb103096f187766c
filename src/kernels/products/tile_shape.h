// The block that one CTA computes, and where everything lies in its shared memory.
//
// Weights take the 256 side and rows (tokens) the 192 side, so that ragged experts cost at most 15
// rows: accumulators are [channel, row]. Two math warpgroups own 128 channels each. A cluster of
// two CTAs shares one operand by multicast. Three stages of 56 KB leave 48 KB for two output slots,
// in which a finished piece waits for the copy engine.
#pragma once

#include <cstdint>

#include "schedule/tile_walk.h"

namespace megamoe::products {

using schedule::kClusterSize;
using schedule::Shared;
inline constexpr std::uint16_t kBothCtas = 0b11;
inline constexpr int kNumMathWarpgroups = 2;
inline constexpr int kNumThreads = (1 + kNumMathWarpgroups) * 128;

inline constexpr int kTileChannels = 256;
inline constexpr int kTileRows = schedule::kRowsPerUnit * schedule::kMaxUnitsPerTile;
inline constexpr int kBlockK = 64;
inline constexpr int kBlockChannels = 64;  ///< of one wgmma
inline constexpr int kKStepsPerBlock = kBlockK / 16;
inline constexpr int kNumStages = 3;

inline constexpr int kBlocksPerWarpgroup = kTileChannels / kNumMathWarpgroups / kBlockChannels;
inline constexpr int kAccumulators = kTileRows / 2;
using Accumulators = float[kBlocksPerWarpgroup][kAccumulators];

inline constexpr std::uint32_t kChannelBytes = kTileChannels * kBlockK * 2;
inline constexpr std::uint32_t kRowBytes = kTileRows * kBlockK * 2;
inline constexpr std::uint32_t kStageBytes = kChannelBytes + kRowBytes;
inline constexpr std::uint32_t kUnitBytes = schedule::kRowsPerUnit * kBlockK * 2;

/// Shared memory for output pieces: two of 64 channels of every row of the tile, bf16.
inline constexpr std::uint32_t kPieceBytes = kBlockChannels * kTileRows * 2;
inline constexpr std::uint32_t kAllSlotBytes = 2 * kPieceBytes;
inline constexpr int kNumStoreWarps = 2;
inline constexpr int kMaxSlots = 4;

inline constexpr int kMaxGroups = 512;

/// Warps of the producer warpgroup; the fourth only gives its registers back where it has no role.
enum class ProducerWarp {
  loads = 0,
  stores_slot_0 = 1,
  stores_slot_1 = 2,
  idle = 3,
  pulls = 3,  ///< in products that pull their rows
};
inline constexpr int kProducerRegisters = 40;
inline constexpr int kMathRegisters = 232;

/// Barriers, each named by what is true once its phase completes.
struct Barriers {
  std::uint64_t stage_filled[kNumStages];  ///< both operands of the stage arrived
  std::uint64_t stage_free[kNumStages];  ///< all math warps of the cluster are done with the stage
  std::uint64_t slot_filled[kMaxSlots];  ///< a math warpgroup wrote a piece
  /// The copy engine has read the slot's last piece, and the next one is this warpgroup's to write.
  /// One barrier for each writer: a parity wait is only right for a thread that has waited for
  /// every phase of its barrier.
  std::uint64_t slot_granted[kNumMathWarpgroups][kMaxSlots];
};

struct SharedStorage {
  alignas(1024) std::uint8_t stages[kNumStages][kStageBytes];
  alignas(1024) std::uint8_t slots[kAllSlotBytes];
  Barriers barriers;
  std::int32_t first_tile[kMaxGroups + 1];
};
inline constexpr std::uint32_t kSharedBytes = sizeof(SharedStorage);
static_assert(kSharedBytes <= 232448, "shared memory of one SM");

inline constexpr std::uint32_t kWarpsPerWarpgroup = 4;
inline constexpr std::uint32_t kStageFreeArrivals =
    kClusterSize * kNumMathWarpgroups * kWarpsPerWarpgroup;

}  // namespace megamoe::products
