#include "comm/cuda/places.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <utility>

#include "comm/gpu_hosts_layout.h"
#include "cuda/device_check.h"
#include "cuda/runtime.h"

namespace megamoe::cuda {
namespace {

/// Process numbers are those of a host, or of a container.
std::uint64_t this_process() {
  static const std::uint64_t id = [] {
    std::random_device random;
    return std::uint64_t{random()} << 32 | random();
  }();
  return id;
}

std::uint64_t this_nccl_host() {
  const char* id = std::getenv("NCCL_HOSTID");
  return id == nullptr ? 0 : std::hash<std::string>()(id);
}

bool may_be_joined_by_nccl(const Place& a, const Place& b) {
  return a.device_uuid != b.device_uuid || a.nccl_host != b.nccl_host;
}

/// Of the ranks of one host, from `first` on.
Arrangement arrangement_of(const std::vector<Place>& places, int first_rank, int num_ranks) {
  std::map<std::array<char, 16>, int> first_on_device;
  int first = -1;
  int second = -1;
  bool one_process = true;
  for (int rank = first_rank; rank < first_rank + num_ranks; ++rank) {
    const auto [entry, is_new] = first_on_device.emplace(places[rank].device_uuid, rank);
    if (!is_new && second < 0) {
      first = entry->second;
      second = rank;
    }
    one_process = one_process && places[rank].process == places[first_rank].process;
  }
  if (first_on_device.size() == 1 && one_process) return Arrangement::one_device;
  if (second < 0) return Arrangement::device_each;
  throw Error(ErrorCode::unsupported,
              "ranks " + std::to_string(first) + " and " + std::to_string(second) +
                  " are on the same CUDA device; the ranks of a host have a device each, or all "
                  "share one and are threads of one process");
}

constexpr int kDefaultNetworkCtas = 8;
constexpr CudaHostsOptions kMostOptions{.network_groups = CudaHostsOptions::kMostGroups,
                                        .network_ctas = CudaHostsOptions::kMostCtas};
static_assert(CudaHostsOptions::kMostGroups == kMaxNetworkGroups);

}  // namespace

Place place_of(int device, const std::function<void()>& prepare) {
  Place place;
  place.process = this_process();
  place.device = device;
  place.nccl_host = this_nccl_host();
  place.outcome = outcome_of([&] {
    const cudaDeviceProp properties = require_device(device);
    std::memcpy(place.device_uuid.data(), properties.uuid.bytes, place.device_uuid.size());
    prepare();
  });
  return place;
}

std::vector<Arrangement> arrangements_of(const std::vector<Place>& places,
                                         const Topology& topology) {
  std::vector<Arrangement> arrangements;
  for (int host = 0; host < topology.num_hosts(); ++host) {
    arrangements.push_back(
        arrangement_of(places, topology.rank_of(host, 0), topology.ranks_per_host()));
  }
  return arrangements;
}

int ranks_beside(const std::vector<Place>& places, int rank) {
  const auto is_beside = [&](const Place& place) {
    return place.process == places[rank].process && place.device_uuid == places[rank].device_uuid;
  };
  return static_cast<int>(std::count_if(places.begin(), places.end(), is_beside));
}

std::function<bool(const Place&)> reach_of(int device) {
  std::vector<cudaUUID_t> uuids(num_cuda_devices());
  for (std::size_t other = 0; other < uuids.size(); ++other) {
    cudaDeviceProp properties{};
    check(cudaGetDeviceProperties(&properties, static_cast<int>(other)), "cudaGetDeviceProperties");
    uuids[other] = properties.uuid;
  }
  return [device, uuids = std::move(uuids)](const Place& peer) {
    const auto its = std::find_if(uuids.begin(), uuids.end(), [&](const cudaUUID_t& uuid) {
      return std::memcmp(uuid.bytes, peer.device_uuid.data(), peer.device_uuid.size()) == 0;
    });
    if (its == uuids.end()) return true;
    int can_access = 0;
    check(cudaDeviceCanAccessPeer(&can_access, device, static_cast<int>(its - uuids.begin())),
          "cudaDeviceCanAccessPeer");
    return can_access != 0;
  };
}

HostsAre hosts_are(const std::vector<Place>& places, const Topology& topology) {
  const bool one_process = std::all_of(places.begin(), places.end(), [&](const Place& place) {
    return place.process == places[0].process;
  });
  if (one_process) return HostsAre::threads;
  for (int rank = 0; rank < topology.num_ranks(); ++rank) {
    for (int host = topology.host_of(rank) + 1; host < topology.num_hosts(); ++host) {
      const int other = topology.rank_of(host, topology.local_index_of(rank));
      if (may_be_joined_by_nccl(places[rank], places[other])) continue;
      throw Error(ErrorCode::unsupported,
                  "ranks " + std::to_string(rank) + " and " + std::to_string(other) +
                      " are on the same CUDA device, as processes of different hosts; NCCL, which "
                      "joins hosts, takes a device once, unless NCCL_HOSTID differs");
    }
  }
  return HostsAre::processes;
}

CudaHostsOptions resolved(CudaHostsOptions options) {
  const auto require = [&](int CudaHostsOptions::*member, const char* name) {
    if (options.*member < 0 || options.*member > kMostOptions.*member) {
      throw Error(ErrorCode::invalid_argument,
                  std::string(name) + " is " + std::to_string(options.*member) +
                      ", must be from 0 to " + std::to_string(kMostOptions.*member));
    }
  };
  require(&CudaHostsOptions::network_groups, "network_groups");
  require(&CudaHostsOptions::network_ctas, "network_ctas");
  if (options.network_ctas == 0) options.network_ctas = kDefaultNetworkCtas;
  return options;
}

void require_equal_options(const std::vector<Place>& places) {
  const auto compare = [&](int CudaHostsOptions::*member, const char* name) {
    for (std::size_t rank = 1; rank < places.size(); ++rank) {
      if (places[rank].options.*member == places[0].options.*member) continue;
      throw Error(ErrorCode::config_mismatch,
                  std::string("ranks differ in ") + name + ": rank 0 has " +
                      std::to_string(places[0].options.*member) + ", rank " + std::to_string(rank) +
                      " has " + std::to_string(places[rank].options.*member));
    }
  };
  compare(&CudaHostsOptions::network_groups, "network_groups");
  compare(&CudaHostsOptions::network_ctas, "network_ctas");
}

}  // namespace megamoe::cuda
