// Where the ranks of a group run: devices, processes, options; and what follows from it. Everything
// here is the same on every rank, errors too, where places are.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <vector>

#include "layer/agreement.h"
#include "megamoe/cuda.h"
#include "megamoe/topology.h"

namespace megamoe::cuda {

/// Exchanged as plain data.
struct Place {
  LocalOutcome outcome;
  std::uint64_t process = 0;  ///< of all hosts
  std::array<char, 16> device_uuid{};
  std::uint64_t nccl_host = 0;  ///< of NCCL_HOSTID, by which NCCL tells hosts apart; 0: not set
  std::int32_t device = 0;      ///< as its process numbers it
  CudaHostsOptions options;
};

/// This rank's, without options; `prepare` is what else may fail there.
Place place_of(int device, const std::function<void()>& prepare);

/// How the ranks of a host have devices.
enum class Arrangement { one_device, device_each };
/// By host. Throws Error(unsupported) for what is neither.
std::vector<Arrangement> arrangements_of(const std::vector<Place>& places,
                                         const Topology& topology);

/// Ranks of this rank's process on its device.
int ranks_beside(const std::vector<Place>& places, int rank);

/// Whether `device` of this process may load and store in the memory of a peer's: CUDA says so, or
/// cannot tell, because this process does not see the other device.
std::function<bool(const Place&)> reach_of(int device);

/// Stand-in hosts are threads of one process.
enum class HostsAre { processes, threads };
/// Throws Error(unsupported) where NCCL cannot join them: it takes a device once of a host, and two
/// processes with one device are of one, unless NCCL_HOSTID says otherwise.
HostsAre hosts_are(const std::vector<Place>& places, const Topology& topology);

/// Throws Error(invalid_argument) naming the member that is wrong; fills in defaults.
CudaHostsOptions resolved(CudaHostsOptions options);
/// Throws Error(config_mismatch).
void require_equal_options(const std::vector<Place>& places);

}  // namespace megamoe::cuda
