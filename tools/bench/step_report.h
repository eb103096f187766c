// What `megamoe bench --step` prints and records.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "bench/layer_stack.h"
#include "bench/report.h"
#include "bench/step_bench.h"

namespace megamoe::bench {

struct StepResult {
  std::string shape_name;
  LayerConfig config;
  int num_ranks;
  std::int64_t num_layers;
  std::int64_t num_rows;  ///< over all ranks, in a layer
  StepState state;        ///< of a rank
  StepTimes times;
};

/// `dense_tflops` is 0 where it was not measured, as it always is on the CPU.
void print_step(const StepResult& result, double dense_tflops);
nlohmann::ordered_json to_step_record(const StepResult& result, double dense_tflops,
                                      const RunInfo& run, const std::string& hardware);

}  // namespace megamoe::bench
