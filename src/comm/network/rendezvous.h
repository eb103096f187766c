// How ranks find each other: all tell rank 0 who they are, and it tells all of them.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "comm/network/deadline.h"
#include "comm/network/socket.h"
#include "megamoe/network.h"

namespace megamoe::network {

inline constexpr int kMaxRanks = 256;
inline constexpr std::size_t kMaxHostName = 200;

/// Where a rank listens for its peers, and on which host it is. As it travels.
struct Member {
  std::array<char, kMaxHostName + 1> host{};
  std::array<char, 64> address{};  ///< empty for rank 0: it is reached at the rendezvous
  std::uint16_t port = 0;
};

/// What a rank leaves the rendezvous with.
struct Membership {
  std::uint64_t group_id = 0;  ///< random; equal on all ranks
  std::vector<Member> members_R;
  Socket listener;  ///< of this rank
};

/// Checks rank, number of ranks and host name. Throws invalid_argument.
void check_options(const NetworkOptions& options);

/// What ranks have in common that share memory: the name of the machine and its boot id; and
/// NCCL_HOSTID, for ranks that NCCL takes for different hosts share no memory of devices.
std::string this_host();

/// Rank 0's socket for `rendezvous`; port 0 takes a free one.
Socket listen_at(const Endpoint& rendezvous);

/// Collective. `listener` is rank 0's, from listen_at(); the others need none. Throws
/// deadline_exceeded naming who is missing, peer_failed where rank 0 goes meanwhile,
/// config_mismatch and invalid_argument for ranks that do not fit together.
Membership meet_at(const Endpoint& rendezvous, const NetworkOptions& options, Socket listener,
                   const Deadline& deadline);

}  // namespace megamoe::network
