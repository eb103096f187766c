// What the roles of a cluster share to know their tiles: tile_tickets.cuh.
#pragma once

#include <cstdint>

#include "kernels/products/tile_shape.h"

namespace megamoe::products {

/// More than the tiles that are under way in a cluster (being loaded, multiplied by one warpgroup
/// and the other, and stored), so that the dealer waits for nobody.
inline constexpr int kTicketSlots = 8;

/// In each CTA; of `read_by_all` the first CTA's counts.
struct TicketRing {
  std::uint64_t dealt[kTicketSlots];
  std::uint64_t read_by_all[kTicketSlots];
  std::uint32_t tickets[kTicketSlots];
};

/// Readers of a cluster whose CTAs have so many in their producer warps, the load role among them:
/// every math warp is one, too.
constexpr std::uint32_t num_ticket_readers(int num_producers) {
  return kClusterSize *
         (static_cast<std::uint32_t>(num_producers) + kNumMathWarpgroups * kWarpsPerWarpgroup);
}

}  // namespace megamoe::products
