// Where everything lies in shared memory while fp32 gradients are computed.
//
// An fp32 tile is twice the bytes of a bf16 one: with both warpgroups on one tile the tensor cores
// waited until most of it had left. So the warpgroups work on tiles of their own, 128 channels x
// 192 lines, and take turns, as those of the gate_up gradient do: one multiplies while the other's
// tile leaves. That costs a third more operand traffic. Stored gradients are a tenth faster for it
// at qwen3-235b; what is added into memory still waits for memory (docs/perf_log.md).
#pragma once

#include <cstdint>

#include "kernels/products/ticket_ring.h"
#include "kernels/weight_gradients/weight_gradient.h"

namespace megamoe::products {

inline constexpr int kTurnStages = 4;
inline constexpr std::uint32_t kTurnStageBytes =
    kGradientChannelBytes<GradientType::fp32> + kRowBytes;

struct TurnBarriers {
  std::uint64_t stage_filled[kTurnStages];  ///< both operands of the stage arrived
  std::uint64_t stage_free[kTurnStages];    ///< the cluster's math warps are done with the stage
  /// The other warpgroup has issued its last product, and has waited for every earlier fill of
  /// every stage: a parity wait is only right for a thread that knows of all phases before.
  std::uint64_t may_multiply[kNumMathWarpgroups];
};

struct TurnStorage {
  alignas(1024) std::uint8_t stages[kTurnStages][kTurnStageBytes];
  alignas(1024) std::uint8_t slots[kAllSlotBytes];
  Barriers barriers;  ///< those of the slots
  TurnBarriers turns;
  TicketRing tickets;
  GradientGroups groups;
};
static_assert(sizeof(TurnStorage) <= 232448, "shared memory of one SM");
}  // namespace megamoe::products
