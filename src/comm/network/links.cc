#include "comm/network/links.h"

#include <string>

#include "megamoe/error.h"

namespace megamoe::network {
namespace {

enum class Channel : std::int32_t { data, departure };

struct LinkGreeting {
  std::uint64_t group_id;
  std::int32_t rank;
  Channel channel;
};

constexpr double kGreetingDeadlineS = 5.0;

std::string name_of(const Membership& membership, int rank) {
  return "rank " + std::to_string(rank) + " (on " + membership.members_R[rank].host.data() + ")";
}

Socket connect_to_rank(const Membership& membership, const Endpoint& rendezvous, int rank, int peer,
                       Channel channel, const Deadline& deadline) {
  const Member& member = membership.members_R[peer];
  const Endpoint endpoint = peer == 0 ? rendezvous : Endpoint{member.address.data(), member.port};
  std::string why;
  std::optional<Socket> socket = connect_to(endpoint, deadline, why);
  const LinkGreeting greeting{membership.group_id, rank, channel};
  if (!socket || !send_all(*socket, &greeting, sizeof greeting, deadline)) {
    throw Error(ErrorCode::deadline_exceeded,
                "the network does not reach from " + name_of(membership, rank) + " to " +
                    name_of(membership, peer) + " at " + to_string(endpoint) + ": " +
                    (socket ? "the connection broke" : why));
  }
  return std::move(*socket);
}

Socket& channel_of(Link& link, Channel channel) {
  return channel == Channel::data ? link.data : link.departure;
}

/// Takes the connections of all higher ranks, in whatever order they come.
void accept_higher_ranks(const Membership& membership, int rank, std::vector<Link>& links,
                         const Deadline& deadline) {
  const auto num_ranks = static_cast<int>(links.size());
  int num_missing = 2 * (num_ranks - 1 - rank);
  while (num_missing > 0) {
    std::optional<Socket> socket = accept_from(membership.listener, deadline);
    if (!socket) {
      std::string missing;
      for (int peer = rank + 1; peer < num_ranks; ++peer) {
        if (links[peer].data.is_open() && links[peer].departure.is_open()) continue;
        missing += (missing.empty() ? "" : ", ") + name_of(membership, peer);
      }
      throw Error(ErrorCode::deadline_exceeded,
                  "the network did not reach " + name_of(membership, rank) + " from " + missing +
                      " within " + std::to_string(deadline.seconds()) + " s");
    }
    LinkGreeting greeting{};
    const bool is_peer =
        receive_all(*socket, &greeting, sizeof greeting, deadline.at_most(kGreetingDeadlineS)) &&
        greeting.group_id == membership.group_id && greeting.rank > rank &&
        greeting.rank < num_ranks;
    if (!is_peer) continue;  // others may knock at an open port
    Socket& place = channel_of(links[greeting.rank], greeting.channel);
    if (place.is_open()) continue;
    place = std::move(*socket);
    --num_missing;
  }
}

}  // namespace

std::vector<Link> link_all(const Membership& membership, const Endpoint& rendezvous, int rank,
                           const Deadline& deadline) {
  std::vector<Link> links(membership.members_R.size());
  // Connections wait in the listener's queue: nobody has to accept before it has connected.
  for (int peer = 0; peer < rank; ++peer) {
    for (const Channel channel : {Channel::data, Channel::departure}) {
      channel_of(links[peer], channel) =
          connect_to_rank(membership, rendezvous, rank, peer, channel, deadline);
    }
  }
  accept_higher_ranks(membership, rank, links, deadline);
  return links;
}

}  // namespace megamoe::network
