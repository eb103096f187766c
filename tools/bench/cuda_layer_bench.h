// Times forward and backward of one layer on CUDA devices, a thread a rank.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "bench/samples.h"
#include "megamoe/config.h"

namespace megamoe::bench {

struct CudaLayerTimes {
  /// GPU time from the call to its last kernel; of the slowest rank, after a meeting of all ranks.
  SamplesMs forward_ms;
  SamplesMs backward_ms;
  /// Medians of passes of their own, because looking costs a little; rank 0's.
  std::map<std::string, double> forward_stages_ms;
  std::map<std::string, double> backward_stages_ms;
};

/// Runs `num_repeats` passes in bursts of about 40 ms, each after a pause and a pass that is not
/// counted: the chip's clock falls under sustained load. Every rank has
/// config.shape.max_tokens tokens; `ids_RTK` holds each rank's ids. Inputs are random at unit scale,
/// weights at 1/sqrt(fan in). Throws Error.
CudaLayerTimes time_layer_on_cuda(const LayerConfig& config,
                                  const std::vector<std::vector<std::int32_t>>& ids_RTK,
                                  int num_repeats);

/// What dense products reach on this machine, measured now: bf16, 8192^3, cuBLAS, random data.
/// TFLOP/s of the slowest of the ranks' devices; 0 where cuBLAS (libcublas.so.13 or .12) cannot be
/// loaded.
double dense_tflops(int num_ranks);

std::string cuda_device_name();

}  // namespace megamoe::bench
