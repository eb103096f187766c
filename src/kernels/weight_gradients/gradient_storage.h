// Where everything lies in shared memory while weight gradients are computed.
#pragma once

#include <type_traits>

#include "kernels/weight_gradients/turns.h"

namespace megamoe::products {

/// As bf16: stages and slots as those of the row products.
struct TogetherStorage {
  alignas(1024) std::uint8_t stages[kNumStages][kStageBytes];
  alignas(1024) std::uint8_t slots[kAllSlotBytes];
  Barriers barriers;
  TicketRing tickets;
  GradientGroups groups;
};
static_assert(sizeof(TogetherStorage) <= 232448, "shared memory of one SM");

template <GradientType kType>
using GradientStorage =
    std::conditional_t<kType == GradientType::bf16, TogetherStorage, TurnStorage>;

}  // namespace megamoe::products
