// The connections of a rank to all its peers.
#pragma once

#include <vector>

#include "comm/network/rendezvous.h"
#include "comm/network/socket.h"

namespace megamoe::network {

/// To one peer. Whether it has left, and why, has a connection of its own: the other one may be in
/// the middle of a message when a rank has to leave.
struct Link {
  Socket data;
  Socket departure;
};

/// Collective, with what meet_at() returned. Element `rank` is closed. Throws deadline_exceeded
/// naming the ranks that cannot be reached.
std::vector<Link> link_all(const Membership& membership, const Endpoint& rendezvous, int rank,
                           const Deadline& deadline);

}  // namespace megamoe::network
