#include "comm/cuda/reach.h"

#include <algorithm>

namespace megamoe::cuda {

std::string seats_text(const std::vector<int>& ranks, const std::vector<int>& devices_R) {
  constexpr std::size_t kMostNamed = 4;
  std::string text;
  for (std::size_t i = 0; i < std::min(ranks.size(), kMostNamed); ++i) {
    text += (i > 0 ? ", rank " : "rank ") + std::to_string(ranks[i]) + " (device " +
            std::to_string(devices_R[ranks[i]]) + ")";
  }
  if (ranks.size() > kMostNamed) {
    text += " and " + std::to_string(ranks.size() - kMostNamed) + " more";
  }
  return text;
}

std::string advice_on_reach() {
  return "Ranks of a host need it, with overlap on and off (nvidia-smi topo -p2p rw shows who has "
         "it); ranks of different hosts (--host-name, megamoe.init(host=), NCCL_HOSTID) exchange "
         "by "
         "NCCL's network instead";
}

Error out_of_reach(int rank, const std::vector<int>& peers, const std::vector<int>& devices_R,
                   const std::string& reason) {
  return {ErrorCode::unsupported,
          seats_text({rank}, devices_R) + " cannot load and store in the memory of " +
              seats_text(peers, devices_R) + ": " + reason + ". " + advice_on_reach()};
}

std::vector<int> devices_of(const std::vector<Place>& places) {
  std::vector<int> devices_R;
  for (const Place& place : places) devices_R.push_back(place.device);
  return devices_R;
}

void require_reach(const std::vector<Place>& places, const Topology& topology, int rank,
                   const std::function<bool(const Place&)>& may_reach) {
  std::vector<int> unreached;
  for (int index = 0; index < topology.ranks_per_host(); ++index) {
    const int peer = topology.rank_of(topology.host_of(rank), index);
    if (peer != rank && !may_reach(places[peer])) unreached.push_back(peer);
  }
  if (unreached.empty()) return;
  throw out_of_reach(rank, unreached, devices_of(places),
                     "CUDA has no peer access between these devices");
}

}  // namespace megamoe::cuda
