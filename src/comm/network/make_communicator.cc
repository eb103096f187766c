// How a group on several hosts forms: ranks meet, agree who is where, connect, and form a group on
// every host.
#include <array>
#include <cstdio>
#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "base/longest_wait.h"
#include "comm/network/links.h"
#include "comm/network/mesh.h"
#include "comm/network/network_communicator.h"
#include "comm/network/rendezvous.h"
#include "comm/process_communicator.h"
#include "comm/run_ranks.h"
#include "megamoe/network.h"

namespace megamoe {
namespace {

using network::Deadline;
using network::Endpoint;
using network::Membership;
using network::Mesh;
using network::NetworkCommunicator;
using network::Socket;

Topology topology_of(const Membership& membership) {
  std::vector<std::string> host_names_R;
  for (const network::Member& member : membership.members_R) {
    host_names_R.emplace_back(member.host.data());
  }
  return Topology(host_names_R);
}

/// `make_host_group(topology, group id, mesh)` gives the group of this rank's host.
template <class MakeHostGroup>
std::unique_ptr<Communicator> join_group(const Endpoint& rendezvous, const NetworkOptions& options,
                                         Socket listener, double deadline_s,
                                         const MakeHostGroup& make_host_group) {
  const Deadline deadline(deadline_s);
  const Membership membership =
      network::meet_at(rendezvous, options, std::move(listener), deadline);
  const Topology topology = topology_of(membership);
  auto mesh = std::make_unique<Mesh>(
      network::link_all(membership, rendezvous, options.rank, deadline), options.rank);
  std::unique_ptr<Communicator> host_group;
  try {
    host_group = make_host_group(topology, membership.group_id, *mesh);
  } catch (const std::exception& error) {
    mesh->leave(error.what());
    throw;
  }
  auto communicator =
      std::make_unique<NetworkCommunicator>(topology, std::move(mesh), std::move(host_group));
  communicator->barrier("the construction of a group on several hosts", deadline_s);
  return communicator;
}

std::string host_group_name(std::uint64_t group_id, int host) {
  std::array<char, 48> name{};
  std::snprintf(name.data(), name.size(), "net-%016llx-%d",
                static_cast<unsigned long long>(group_id), host);
  return name.data();
}

}  // namespace

std::unique_ptr<Communicator> make_network_communicator(const NetworkOptions& options,
                                                        double deadline_s) {
  NetworkOptions named = options;
  if (named.host_name.empty()) named.host_name = network::this_host();
  network::check_options(named);
  require_deadline("deadline_s", deadline_s);
  const Endpoint rendezvous = network::parse_endpoint(options.rendezvous, "rendezvous");
  network::require_resolvable(rendezvous);
  Socket listener = options.rank == 0 ? network::listen_at(rendezvous) : Socket();
  return join_group(rendezvous, named, std::move(listener), deadline_s,
                    [&](const Topology& topology, std::uint64_t group_id, Mesh& mesh) {
                      const int host = topology.host_of(options.rank);
                      try {
                        return make_process_communicator(
                            host_group_name(group_id, host), topology.local_index_of(options.rank),
                            topology.ranks_per_host(), deadline_s,
                            [&] { mesh.throw_if_left("the other processes of its host"); });
                      } catch (const Error& error) {
                        if (mesh.has_failed())
                          throw;  // whoever has left is named as the group names it
                        throw Error(
                            error.code(),
                            "ranks that name the host " + topology.host_name(host) +
                                " must share its memory (NetworkOptions::host_name); where rank " +
                                std::to_string(topology.rank_of(host, 0)) +
                                " is the first and called 0: " + error.what());
                      }
                    });
}

std::vector<std::unique_ptr<Communicator>> make_thread_communicators(const Topology& topology) {
  const int num_ranks = topology.num_ranks();
  if (topology.num_hosts() == 1) return make_thread_communicators(num_ranks);
  constexpr double kDeadlineS = 60.0;
  Socket listener = network::listen_at({"127.0.0.1", 0});
  const Endpoint rendezvous{"127.0.0.1", network::port_of(listener)};
  std::vector<std::unique_ptr<Communicator>> host_groups_R;
  for (int host = 0; host < topology.num_hosts(); ++host) {
    for (auto& communicator : make_thread_communicators(topology.ranks_per_host())) {
      host_groups_R.push_back(std::move(communicator));
    }
  }
  std::vector<std::unique_ptr<Communicator>> communicators(num_ranks);
  std::mutex mutex;
  std::exception_ptr first_error;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        const NetworkOptions options{rank, num_ranks, to_string(rendezvous),
                                     topology.host_name(topology.host_of(rank))};
        communicators[rank] = join_group(
            rendezvous, options, rank == 0 ? std::move(listener) : Socket(), kDeadlineS,
            [&](const Topology&, std::uint64_t, Mesh&) { return std::move(host_groups_R[rank]); });
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!first_error) first_error = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (first_error) std::rethrow_exception(first_error);
  return communicators;
}

void run_ranks(const Topology& topology, const std::function<void(Communicator&)>& rank_main) {
  run_ranks_of(make_thread_communicators(topology), rank_main);
}

}  // namespace megamoe
