// Times forward and backward of one layer on CUDA devices, a thread or a process a rank.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "bench/samples.h"
#include "megamoe/communicator.h"
#include "megamoe/config.h"
#include "megamoe/cuda.h"

namespace megamoe::bench {

struct CudaLayerTimes {
  /// GPU time from the call to its last kernel; of the slowest rank, after a meeting of all ranks.
  SamplesMs forward_ms;
  SamplesMs backward_ms;
  /// Of each rank's device over a pass, forward and backward; medians.
  std::vector<double> clock_ghz_R;
  /// Medians of passes of their own, because looking costs a little; of the rank that receives most
  /// rows, as all that follows.
  std::map<std::string, double> forward_stages_ms;
  std::map<std::string, double> backward_stages_ms;
  /// Of the time of the products of a pass, mean over multiprocessors: how long a loader waits for
  /// rows before its first tile, and before later tiles (0 without overlap). Medians.
  struct AwaitedRows {
    double start_share = 0.0;
    double exposed_share = 0.0;
  };
  AwaitedRows forward_rows;
  AwaitedRows backward_rows;
  /// From a CTA's end to the end of its product, mean over multiprocessors, summed over the
  /// products of a pass and divided by their time. Products that the pass launches twice (rows
  /// beyond the kept ones) are left out of both. Medians.
  double forward_tail_share = 0.0;
  double backward_tail_share = 0.0;
  /// Of the time from the start of dx until all ranks are done, the part in which this rank is and
  /// waits for the others; and of its tokens, those whose dx was summed beside its weight
  /// gradients. 0 without overlap. Medians.
  double peers_awaited_share = 0.0;
  double summed_beside_share = 0.0;
};

/// Runs `num_repeats` passes in bursts of about 40 ms, each after a pause and a pass that is not
/// counted: the chip's clock falls under sustained load. Every rank has
/// config.shape.max_tokens tokens; `ids_RTK` holds each rank's ids. Inputs are random at unit
/// scale, weights at 1/sqrt(fan in). Ranks are threads of this process, or, where `launched` is not
/// null, its processes, which all get the times; `hosts` says how calls over several hosts run.
/// Throws Error.
CudaLayerTimes time_layer_on_cuda(const LayerConfig& config,
                                  const std::vector<std::vector<std::int32_t>>& ids_RTK,
                                  int num_repeats, Communicator* launched = nullptr,
                                  const CudaHostsOptions& hosts = {});

/// What dense products reach, and at which clock of the multiprocessors.
struct DenseRate {
  double tflops = 0.0;
  double clock_ghz = 0.0;
};
/// Measured now: bf16, 8192^3, cuBLAS, random data, a burst of 40 ms. Of the slowest of the ranks'
/// devices; 0 where cuBLAS (libcublas.so.13 or .12) cannot be loaded.
DenseRate dense_rate(int num_ranks, Communicator* launched = nullptr);

std::string cuda_device_name();

}  // namespace megamoe::bench
