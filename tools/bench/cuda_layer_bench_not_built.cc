// A build without CUDA.
#include "bench/cuda_layer_bench.h"
#include "megamoe/error.h"

namespace megamoe::bench {
namespace {

[[noreturn]] void refuse() {
  throw Error(ErrorCode::unsupported,
              "backend cuda: this build has none (MEGAMOE_CUDA is off); use the cpu backend");
}

}  // namespace

CudaLayerTimes time_layer_on_cuda(const LayerConfig& /*config*/,
                                  const std::vector<std::vector<std::int32_t>>& /*ids_RTK*/,
                                  int /*num_repeats*/, Communicator* /*launched*/,
                                  const CudaHostsOptions& /*hosts*/) {
  refuse();
}
DenseRate dense_rate(int /*num_ranks*/, Communicator* /*launched*/) { refuse(); }
std::string cuda_device_name() { refuse(); }

}  // namespace megamoe::bench
