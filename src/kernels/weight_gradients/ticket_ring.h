// What the roles of a CTA share to know their tiles: tile_tickets.cuh, gradient_groups.cuh.
#pragma once

#include <cstdint>

#include "kernels/products/tile_shape.h"

namespace megamoe::products {

/// Roles are at most four tiles apart: what is loaded, multiplied, stored.
inline constexpr int kTicketSlots = 8;

/// In each CTA; of `read_by_all` the first CTA's counts.
struct TicketRing {
  std::uint64_t dealt[kTicketSlots];
  std::uint64_t read_by_all[kTicketSlots];
  std::uint32_t tickets[kTicketSlots];
};

/// The load role, the store roles, and the math warps.
inline constexpr std::uint32_t kTicketReaders =
    kClusterSize * (1 + kNumStoreWarps + kNumMathWarpgroups * kWarpsPerWarpgroup);

/// A list of experts.
struct GradientGroups {
  std::int32_t num_groups;
  std::uint16_t groups[kMaxGroups];
};

}  // namespace megamoe::products
