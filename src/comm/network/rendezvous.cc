#include "comm/network/rendezvous.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <random>

#include "layer/agreement.h"
#include "megamoe/error.h"

namespace megamoe::network {
namespace {

/// "MEGAMOE" and the version of what follows. Reversed on a machine of the other byte order.
constexpr std::uint64_t kMagic = 0x4d4547414d4f4501;
/// Others may knock at an open port: they get little time.
constexpr double kGreetingDeadlineS = 5.0;
/// Rank 0 answers at its deadline; its answer needs time to arrive.
constexpr double kAnswerGraceS = 5.0;

struct Greeting {
  std::uint64_t magic = kMagic;
  std::int32_t rank = 0;
  std::int32_t num_ranks = 0;
  Member member;
};

struct Answer {
  std::uint64_t magic = kMagic;
  std::uint64_t group_id = 0;
  LocalOutcome outcome;  ///< failed: the group does not form, for this reason
};

template <std::size_t Size>
void copy_text(const std::string& text, std::array<char, Size>& out) {
  std::strncpy(out.data(), text.c_str(), Size - 1);
}

LocalOutcome refusal(ErrorCode code, const std::string& reason) {
  return outcome_of([&] { throw Error(code, reason); });
}

/// A greeting that is none, or that does not fit the group: why. Not failed where it fits.
LocalOutcome check_greeting(const Greeting& greeting, const std::vector<Socket>& ranks,
                            const NetworkOptions& options) {
  if (greeting.num_ranks != options.num_ranks) {
    return refusal(ErrorCode::config_mismatch, "the group at " + options.rendezvous + " has " +
                                                   std::to_string(options.num_ranks) +
                                                   " ranks, rank " + std::to_string(greeting.rank) +
                                                   " was told " +
                                                   std::to_string(greeting.num_ranks));
  }
  const bool is_taken =
      greeting.rank <= 0 || greeting.rank >= options.num_ranks || ranks[greeting.rank].is_open();
  if (!is_taken) return {};
  return refusal(ErrorCode::invalid_argument,
                 "rank " + std::to_string(greeting.rank) + " of the group at " +
                     options.rendezvous +
                     " has joined already; give every group a rendezvous of its own");
}

std::string missing_ranks(const std::vector<Socket>& ranks) {
  std::string missing;
  for (std::size_t rank = 1; rank < ranks.size(); ++rank) {
    if (!ranks[rank].is_open()) missing += (missing.empty() ? "" : ", ") + std::to_string(rank);
  }
  return missing;
}

/// Whether all connections of a group that meets there stay on the loopback interface.
bool stays_on_loopback(const Endpoint& rendezvous) {
  return rendezvous.address == "localhost" || is_loopback(rendezvous.address);
}

/// Where the others reach a rank that has connected to rank 0. A rank that stays on the loopback
/// interface listens at the rendezvous's address, whatever address it connects from (127.0.0.1 also
/// where it connects to 127.0.1.1).
std::string address_of_rank(const Endpoint& rendezvous, const Socket& socket) {
  return is_loopback(rendezvous.address) ? rendezvous.address : peer_address(socket);
}

/// Ranks that rank 0 sees on the loopback interface are on its machine: others reach them where
/// they reach rank 0, at the address of its own end of their connections.
void replace_loopback(std::vector<Member>& members, const std::vector<Socket>& ranks) {
  std::string own;
  for (std::size_t rank = 1; rank < ranks.size(); ++rank) {
    if (!is_loopback(peer_address(ranks[rank]))) own = own_address(ranks[rank]);
  }
  if (own.empty()) return;
  for (std::size_t rank = 1; rank < ranks.size(); ++rank) {
    if (is_loopback(peer_address(ranks[rank]))) copy_text(own, members[rank].address);
  }
}

/// An address of another machine may yet lead here, where it is translated on the way.
std::string where_it_is(const Endpoint& rendezvous) {
  return is_of_this_machine(rendezvous)
             ? ""
             : ", which is no address of rank 0's machine (" + this_host() + ")";
}

/// Rank 0's part.
Membership gather(const Endpoint& rendezvous, const NetworkOptions& options, Socket listener,
                  const Deadline& deadline) {
  Membership membership;
  membership.members_R.resize(options.num_ranks);
  std::vector<Socket> ranks(options.num_ranks);  // [0] stays closed
  copy_text(options.host_name, membership.members_R[0].host);
  std::random_device random;
  membership.group_id = (std::uint64_t{random()} << 32) | random();

  const std::string where = where_it_is(rendezvous);
  int num_joined = 1;
  LocalOutcome outcome;
  while (num_joined < options.num_ranks) {
    std::optional<Socket> socket = accept_from(listener, deadline);
    if (!socket) {
      outcome = refusal(ErrorCode::deadline_exceeded,
                        "rank 0 waited " + std::to_string(deadline.seconds()) + " s at " +
                            options.rendezvous + where + "; missing: rank " + missing_ranks(ranks));
      break;
    }
    Greeting greeting;
    const Deadline soon = deadline.at_most(kGreetingDeadlineS);
    if (!receive_all(*socket, &greeting, sizeof greeting, soon) || greeting.magic != kMagic) {
      continue;
    }
    const LocalOutcome refused = check_greeting(greeting, ranks, options);
    if (refused.failed != 0) {
      const Answer answer{kMagic, 0, refused};
      send_all(*socket, &answer, sizeof answer, soon);
      continue;
    }
    Member& member = membership.members_R[greeting.rank];
    member = greeting.member;
    member.host.back() = '\0';
    copy_text(address_of_rank(rendezvous, *socket), member.address);
    ranks[greeting.rank] = std::move(*socket);
    ++num_joined;
  }

  replace_loopback(membership.members_R, ranks);
  const Answer answer{kMagic, membership.group_id, outcome};
  for (const Socket& socket : ranks) {
    if (!socket.is_open()) continue;
    const Deadline soon(kGreetingDeadlineS);  // whoever does not take it is missed in what follows
    if (!send_all(socket, &answer, sizeof answer, soon) || outcome.failed != 0) continue;
    send_all(socket, membership.members_R.data(), membership.members_R.size() * sizeof(Member),
             soon);
  }
  throw_if_failed(outcome, 0, 0);
  membership.listener = std::move(listener);
  return membership;
}

/// The part of all others.
Membership join(const Endpoint& rendezvous, const NetworkOptions& options,
                const Deadline& deadline) {
  const auto fail = [&](const std::string& what) {
    throw Error(ErrorCode::deadline_exceeded, "rank " + std::to_string(options.rank) + " waited " +
                                                  std::to_string(deadline.seconds()) +
                                                  " s for rank 0 at " + options.rendezvous + " (" +
                                                  what + ")");
  };
  std::string why;
  std::optional<Socket> socket = connect_to(rendezvous, deadline, why);
  if (!socket) fail(why);

  Membership membership;
  membership.listener = listen_at({rendezvous.address, 0});
  Greeting greeting;
  greeting.rank = options.rank;
  greeting.num_ranks = options.num_ranks;
  copy_text(options.host_name, greeting.member.host);
  greeting.member.port = port_of(membership.listener);
  const Deadline answered(deadline.seconds() + kAnswerGraceS);
  Answer answer;
  const auto lost = [&] {
    if (answered.has_passed()) fail("no answer: the group has not formed");
    throw Error(ErrorCode::peer_failed,
                "rank " + std::to_string(options.rank) + " reached " + options.rendezvous +
                    ", which ended the connection before the group had formed: rank 0 has gone, "
                    "or something else listens there");
  };
  if (!send_all(*socket, &greeting, sizeof greeting, answered) ||
      !receive_all(*socket, &answer, sizeof answer, answered)) {
    lost();
  }
  if (answer.magic != kMagic) {
    throw Error(ErrorCode::config_mismatch, "what listens at " + options.rendezvous +
                                                " is not rank 0 of a group like this one");
  }
  throw_if_failed(answer.outcome, 0, 0);
  membership.group_id = answer.group_id;
  membership.members_R.resize(options.num_ranks);
  if (!receive_all(*socket, membership.members_R.data(),
                   membership.members_R.size() * sizeof(Member), answered)) {
    lost();
  }
  return membership;
}

}  // namespace

void check_options(const NetworkOptions& options) {
  const auto require = [](bool holds, const std::string& message) {
    if (!holds) throw Error(ErrorCode::invalid_argument, message);
  };
  require(options.num_ranks >= 1 && options.num_ranks <= kMaxRanks,
          "num_ranks is " + std::to_string(options.num_ranks) + ", must be from 1 to " +
              std::to_string(kMaxRanks));
  require(options.rank >= 0 && options.rank < options.num_ranks,
          "rank is " + std::to_string(options.rank) + ", must be from 0 to " +
              std::to_string(options.num_ranks - 1));
  require(options.host_name.size() <= kMaxHostName,
          "host_name has " + std::to_string(options.host_name.size()) + " characters, at most " +
              std::to_string(kMaxHostName) + " are taken");
}

std::string this_host() {
  std::array<char, kMaxHostName / 2> name{};
  gethostname(name.data(), name.size() - 1);
  std::string boot_id;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot_id);
  std::string host = std::string(name.data()) + " (boot " + boot_id.substr(0, 36) + ")";
  if (const char* nccl_host = std::getenv("NCCL_HOSTID"); nccl_host != nullptr)
    host.append(1, ' ').append(nccl_host);
  return host;
}

Socket listen_at(const Endpoint& rendezvous) {
  // Every address, because the name of the own machine may well resolve to loopback there, and to
  // something else on its peers.
  return listen_on({stays_on_loopback(rendezvous) ? rendezvous.address : "", rendezvous.port});
}

Membership meet_at(const Endpoint& rendezvous, const NetworkOptions& options, Socket listener,
                   const Deadline& deadline) {
  return options.rank == 0 ? gather(rendezvous, options, std::move(listener), deadline)
                           : join(rendezvous, options, deadline);
}

}  // namespace megamoe::network
