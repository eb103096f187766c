// Times a training step through a stack of layers: forward of all, then backward of all.
#pragma once

#include <cstdint>
#include <vector>

#include "bench/samples.h"
#include "megamoe/config.h"

namespace megamoe::bench {

/// What is timed: each rank has config.shape.max_tokens tokens, and `ids_RTK` each rank's ids, the
/// same in every layer.
struct StepProblem {
  LayerConfig config;
  std::int64_t num_layers;
  std::vector<std::vector<std::int32_t>> ids_RTK;

  [[nodiscard]] int num_ranks() const { return static_cast<int>(ids_RTK.size()); }
};

/// Of the slowest rank, after a meeting of all.
struct PassTimes {
  SamplesMs forward_ms;
  SamplesMs backward_ms;

  /// Of a whole pass, repeat by repeat.
  [[nodiscard]] SamplesMs total_ms() const;
};

struct StepTimes {
  PassTimes step;       ///< of all layers
  PassTimes one_layer;  ///< of the first layer alone, in the same run
};

/// After a pass that is not counted. Throws Error; out_of_memory before anything is allocated where
/// the stack does not fit the machine.
StepTimes time_step_on_cpu(const StepProblem& problem, int num_repeats);

/// In bursts of about 40 ms, each after a pause and a pass that is not counted, as layers are timed
/// (cuda_layer_bench.h). Throws as the other one; unsupported without CUDA in the build.
StepTimes time_step_on_cuda(const StepProblem& problem, int num_repeats);

/// Takes the larger of both, sample by sample.
void keep_slowest(PassTimes& times, const PassTimes& other);

}  // namespace megamoe::bench
