// What `megamoe bench` prints and records.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bench/cuda_layer_bench.h"
#include "bench/layer_bench.h"
#include "bench/routing.h"
#include "bench/run_info.h"
#include "bench/shapes.h"

namespace megamoe::bench {

/// The machine's ceiling and how near the product alone comes to it, measured in the same run.
struct Ceiling {
  double core_peak_gflops;  ///< fp32 fma of one core
  int num_threads;          ///< of all ranks together, at most the machine's
  struct Product {
    std::int64_t dim;
    double gflops;  ///< one thread
  };
  std::vector<Product> products;

  [[nodiscard]] double peak_gflops() const { return core_peak_gflops * num_threads; }
};

struct LayerResult {
  std::string shape_name;
  LayerConfig config;
  int num_ranks;
  std::int64_t num_rows;  ///< over all ranks
  Routing routing;
  BusiestRows busiest;
  LayerTimes times;
  TrafficComparison traffic;
};

struct CudaLayerResult {
  std::string shape_name;
  LayerConfig config;
  int num_ranks;
  int num_hosts;
  CudaHostsOptions hosts;  ///< as asked for
  std::int64_t num_rows;   ///< over all ranks
  Routing routing;
  BusiestRows busiest;
  CudaLayerTimes times;
};

/// As records spell them.
const char* to_text(MemoryMode mode);
const char* to_text(WeightGradientMode mode);
/// Members that all records have.
void append_layer(nlohmann::ordered_json& record, const std::string& shape_name,
                  const MoeShape& shape, int num_ranks);

void print_ceiling(const Ceiling& ceiling);
void print_result(const LayerResult& result, const Ceiling& ceiling);
nlohmann::ordered_json to_record(const LayerResult& result, const Ceiling& ceiling,
                                 const RunInfo& run);

/// `dense_tflops` is 0 where it could not be measured.
void print_cuda_result(const CudaLayerResult& result, double dense_tflops);
nlohmann::ordered_json to_cuda_record(const CudaLayerResult& result, const DenseRate& dense,
                                      const RunInfo& run);

}  // namespace megamoe::bench
