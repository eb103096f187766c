#include "records.h"

#include <cuda_runtime_api.h>

#include <cstdlib>
#include <utility>

#include "comm/cuda/nccl_library.h"
#include "cuda/runtime.h"

namespace megamoe::bench {

using cuda::check;

Machine machine_of(const std::string& command, const Topology& topology, int device) {
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
  const auto cuda_version = [](int number) {
    return std::to_string(number / 1000) + "." + std::to_string(number % 1000 / 10);
  };
  int runtime = 0;
  int driver = 0;
  int nccl = 0;
  check(cudaRuntimeGetVersion(&runtime), "cudaRuntimeGetVersion");
  check(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
  nccl::check(nccl::library().get_version(&nccl), "ncclGetVersion");
  const char* net = std::getenv("NCCL_NET");
  const char* interface = std::getenv("NCCL_SOCKET_IFNAME");
  return {run_info(command),
          std::to_string(topology.num_ranks()) + " x " + properties.name,
          std::string("NCCL_NET=") + (net == nullptr ? "" : net) +
              ", NCCL_SOCKET_IFNAME=" + (interface == nullptr ? "" : interface),
          {{"cuda", cuda_version(runtime)},
           {"driver", cuda_version(driver)},
           {"nccl", std::to_string(nccl / 10000) + "." + std::to_string(nccl / 100 % 100) + "." +
                        std::to_string(nccl % 100)}}};
}

void append(Json& records, Json record, const Machine& machine) {
  append_run(record, machine.run, machine.hardware);
  record["versions"].update(machine.versions);
  record["network"] = machine.network;
  records.push_back(std::move(record));
}

}  // namespace megamoe::bench
