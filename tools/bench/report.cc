#include "bench/report.h"

#include <cstdio>

#include "common/machine.h"
#include "cpu/fma_peak.h"

namespace megamoe::bench {
namespace {

double gflops(double flops, double ms) { return flops / ms * 1e-6; }

void print_pass(const char* name, const SamplesMs& samples_ms, double flops,
                const Ceiling& ceiling) {
  const Summary summary = summarize(samples_ms);
  const double rate = gflops(flops, summary.median_ms);
  std::printf("  %-9s%10.2f ms [%.2f, %.2f]  %8.1f GFLOP/s  %5.1f%% of peak\n", name,
              summary.median_ms, summary.min_ms, summary.max_ms, rate,
              100.0 * rate / ceiling.peak_gflops());
}

double megabytes(std::int64_t bytes) { return static_cast<double>(bytes) * 1e-6; }

nlohmann::ordered_json bytes_json(const Traffic& traffic) {
  return {{"forward", traffic.forward_bytes}, {"backward", traffic.backward_bytes}};
}

nlohmann::ordered_json products_json(const Ceiling& ceiling) {
  nlohmann::ordered_json products = nlohmann::ordered_json::object();
  for (const Ceiling::Product& product : ceiling.products) {
    products[std::to_string(product.dim)] = product.gflops;
  }
  return products;
}

/// A rank's, which is a GPU's where ranks have one each.
double rank_tflops(double flops, double ms, int num_ranks) {
  return gflops(flops, ms) * 1e-3 / num_ranks;
}

}  // namespace

const char* to_text(MemoryMode mode) { return mode == MemoryMode::saved ? "saved" : "recompute"; }

const char* to_text(WeightGradientMode mode) {
  switch (mode) {
    case WeightGradientMode::store_bf16:
      return "store_bf16";
    case WeightGradientMode::store_fp32:
      return "store_fp32";
    case WeightGradientMode::accumulate_fp32:
      return "accumulate_fp32";
  }
  return "unknown";
}

// The parts that records have in common, in the order of their members.

void append_layer(nlohmann::ordered_json& record, const std::string& shape_name,
                  const MoeShape& shape, int num_ranks) {
  record["shape"] = shape_name;
  record["hidden_dim"] = shape.hidden_dim;
  record["intermediate_dim"] = shape.intermediate_dim;
  record["num_experts"] = shape.num_experts;
  record["top_k"] = shape.top_k;
  record["tokens_per_rank"] = shape.max_tokens;
  record["ranks"] = num_ranks;
}

namespace {

template <class Result>
void append_times(nlohmann::ordered_json& record, const Result& result, const SamplesMs& forward_ms,
                  const SamplesMs& backward_ms) {
  const MoeShape& shape = result.config.shape;
  const Summary forward = summarize(forward_ms);
  const Summary backward = summarize(backward_ms);
  record["forward_ms"] = forward.median_ms;
  record["forward_ms_range"] = {forward.min_ms, forward.max_ms};
  record["backward_ms"] = backward.median_ms;
  record["backward_ms_range"] = {backward.min_ms, backward.max_ms};
  record["forward_tflops"] =
      rank_tflops(forward_flops(result.num_rows, shape), forward.median_ms, result.num_ranks);
  record["backward_tflops"] =
      rank_tflops(backward_flops(result.num_rows, shape), backward.median_ms, result.num_ranks);
}

/// How long the rank with most rows computes at least, where a rank reaches `rank_tflops`; 0 where
/// that is not known. No layer is faster, whatever it does about the other ranks.
struct BusiestFloorMs {
  double forward;
  double backward;
};
template <class Result>
BusiestFloorMs busiest_floor_ms(const Result& result, double rank_tflops) {
  if (rank_tflops <= 0.0) return {0.0, 0.0};
  const MoeShape& shape = result.config.shape;
  return {forward_flops(result.busiest.of_rank, shape) / rank_tflops * 1e-9,
          backward_flops(result.busiest.of_rank, shape) / rank_tflops * 1e-9};
}

template <class Result>
void append_routing(nlohmann::ordered_json& record, const Result& result, double rank_tflops) {
  const BusiestFloorMs floor = busiest_floor_ms(result, rank_tflops);
  record["routing"] = to_string(result.routing);
  record["busiest_rank"] = result.busiest.rank;
  record["busiest_rank_rows"] = result.busiest.of_rank;
  record["busiest_expert_rows"] = result.busiest.of_expert;
  record["busiest_rank_floor_ms"] = {{"forward", floor.forward}, {"backward", floor.backward}};
}

template <class Result>
void print_busiest(const Result& result, double rank_tflops) {
  const BusiestFloorMs floor = busiest_floor_ms(result, rank_tflops);
  std::printf("  routing %s: busiest rank %lld rows (%.2f of the mean), busiest expert %lld",
              to_string(result.routing), static_cast<long long>(result.busiest.of_rank),
              static_cast<double>(result.busiest.of_rank) * result.num_ranks /
                  static_cast<double>(result.num_rows),
              static_cast<long long>(result.busiest.of_expert));
  if (floor.forward > 0.0) {
    const double forward_ms = summarize(result.times.forward_ms).median_ms;
    const double backward_ms = summarize(result.times.backward_ms).median_ms;
    std::printf("; its rows take %.3f and %.3f ms at P, %.2f and %.2f of what passes",
                floor.forward, floor.backward, floor.forward / forward_ms,
                floor.backward / backward_ms);
  }
  std::printf("\n");
}

/// The ranks share the machine's cores.
double rank_peak_tflops(const LayerResult& result, const Ceiling& ceiling) {
  return ceiling.peak_gflops() * 1e-3 / result.num_ranks;
}

}  // namespace

void print_ceiling(const Ceiling& ceiling) {
  std::printf("%s, %s; fp32 fma peak %.1f GFLOP/s a core, %.1f on the %d threads of all ranks\n",
              tools::processor_name().c_str(), cpu::simd_target_name(), ceiling.core_peak_gflops,
              ceiling.peak_gflops(), ceiling.num_threads);
  for (const Ceiling::Product& product : ceiling.products) {
    const auto dim = static_cast<long long>(product.dim);
    std::printf("product %lldx%lldx%lld on one thread: %.1f GFLOP/s, %.1f%% of the core's peak\n",
                dim, dim, dim, product.gflops, 100.0 * product.gflops / ceiling.core_peak_gflops);
  }
}

void print_result(const LayerResult& result, const Ceiling& ceiling) {
  const MoeShape& shape = result.config.shape;
  std::printf(
      "\n%s: hidden %lld, intermediate %lld, experts %d, top-k %d; %d ranks of %lld tokens, %s\n",
      result.shape_name.c_str(), static_cast<long long>(shape.hidden_dim),
      static_cast<long long>(shape.intermediate_dim), shape.num_experts, shape.top_k,
      result.num_ranks, static_cast<long long>(shape.max_tokens),
      to_text(result.config.memory_mode));
  print_pass("forward", result.times.forward_ms, forward_flops(result.num_rows, shape), ceiling);
  print_pass("backward", result.times.backward_ms, backward_flops(result.num_rows, shape), ceiling);
  print_busiest(result, rank_peak_tflops(result, ceiling));
  const TrafficComparison& traffic = result.traffic;
  std::printf(
      "  between ranks: forward %.2f MB, backward %.2f MB; with a copy a slot %.2f and %.2f MB\n",
      megabytes(traffic.once.forward_bytes), megabytes(traffic.once.backward_bytes),
      megabytes(traffic.per_slot.forward_bytes), megabytes(traffic.per_slot.backward_bytes));
}

nlohmann::ordered_json to_record(const LayerResult& result, const Ceiling& ceiling,
                                 const RunInfo& run) {
  nlohmann::ordered_json record = {{"layer", "megamoe"},
                                   {"backend", "cpu"},
                                   {"path", "sequential"},
                                   {"mode", to_text(result.config.memory_mode)}};
  append_layer(record, result.shape_name, result.config.shape, result.num_ranks);
  record["threads"] = ceiling.num_threads;
  append_times(record, result, result.times.forward_ms, result.times.backward_ms);
  append_routing(record, result, rank_peak_tflops(result, ceiling));
  record["fma_peak_gflops"] = ceiling.peak_gflops();
  record["core_fma_peak_gflops"] = ceiling.core_peak_gflops;
  record["core_product_gflops"] = products_json(ceiling);
  record["bytes_between_ranks"] = bytes_json(result.traffic.once);
  record["bytes_between_ranks_per_slot"] = bytes_json(result.traffic.per_slot);
  append_run(record, run,
             tools::processor_name() + ", " + std::to_string(tools::num_cpu_threads()) +
                 " threads, " + cpu::simd_target_name());
  return record;
}

namespace {

void print_cuda_pass(const CudaLayerResult& result, const char* name, const SamplesMs& samples_ms,
                     double flops, double dense_tflops,
                     const std::map<std::string, double>& stages_ms) {
  const Summary summary = summarize(samples_ms);
  const double rate = rank_tflops(flops, summary.median_ms, result.num_ranks);
  std::printf("  %-9s%8.3f ms [%.3f, %.3f]  %6.1f TFLOP/s", name, summary.median_ms, summary.min_ms,
              summary.max_ms, rate);
  if (dense_tflops > 0) std::printf("  %.3f P", rate / dense_tflops);
  std::printf("\n           ");
  for (const auto& [stage, ms] : stages_ms) std::printf(" %s %.3f", stage.c_str(), ms);
  std::printf("\n");
}

/// What is measured within the kernels of one host.
bool has_shares(const CudaLayerResult& result) { return result.num_hosts == 1; }

/// How rows travel: one after the other with the products, from within their kernels, or between
/// hosts beside groups of experts.
const char* path_of(const CudaLayerResult& result) {
  if (result.config.overlap == Overlap::off) return "sequential";
  return result.num_hosts == 1 ? "fused" : "groups";
}

void print_tail(const CudaLayerResult& result, double share) {
  if (!has_shares(result)) return;
  std::printf("            tails: %.1f%% of the products' time\n", 100.0 * share);
}

void print_awaited(const CudaLayerTimes::AwaitedRows& rows) {
  std::printf("            rows awaited: %.1f%% of the products' time, and %.1f%% at their start\n",
              100.0 * rows.exposed_share, 100.0 * rows.start_share);
}

}  // namespace

void print_cuda_result(const CudaLayerResult& result, double dense_tflops) {
  const MoeShape& shape = result.config.shape;
  std::printf(
      "\n%s: hidden %lld, intermediate %lld, experts %d, top-k %d; %d GPUs of %lld tokens on %d "
      "host%s, %s, overlap %s\n",
      result.shape_name.c_str(), static_cast<long long>(shape.hidden_dim),
      static_cast<long long>(shape.intermediate_dim), shape.num_experts, shape.top_k,
      result.num_ranks, static_cast<long long>(shape.max_tokens), result.num_hosts,
      result.num_hosts == 1 ? "" : "s", to_text(result.config.memory_mode),
      result.config.overlap == Overlap::on ? "on" : "off");
  print_cuda_pass(result, "forward", result.times.forward_ms, forward_flops(result.num_rows, shape),
                  dense_tflops, result.times.forward_stages_ms);
  const bool has_overlap_shares = result.config.overlap == Overlap::on && has_shares(result);
  if (has_overlap_shares) {
    print_awaited(result.times.forward_rows);
  }
  print_tail(result, result.times.forward_tail_share);
  print_cuda_pass(result, "backward", result.times.backward_ms,
                  backward_flops(result.num_rows, shape), dense_tflops,
                  result.times.backward_stages_ms);
  if (has_overlap_shares) {
    print_awaited(result.times.backward_rows);
    std::printf(
        "            peers awaited: %.1f%% of the time from dx on; dx of %.1f%% of the tokens "
        "summed "
        "beside the weight gradients\n",
        100.0 * result.times.peers_awaited_share, 100.0 * result.times.summed_beside_share);
  }
  print_tail(result, result.times.backward_tail_share);
  std::printf("            multiprocessors of each GPU at");
  for (const double ghz : result.times.clock_ghz_R) std::printf(" %.2f", ghz);
  std::printf(" GHz, forward and backward\n");
  print_busiest(result, dense_tflops);
}

nlohmann::ordered_json to_cuda_record(const CudaLayerResult& result, const DenseRate& dense,
                                      const RunInfo& run) {
  nlohmann::ordered_json record = {
      {"layer", "megamoe"},
      {"backend", "cuda"},
      {"path", path_of(result)},
      {"mode", to_text(result.config.memory_mode)},
      {"weight_gradients", to_text(result.config.weight_gradient_mode)}};
  append_layer(record, result.shape_name, result.config.shape, result.num_ranks);
  if (result.num_hosts > 1) {
    record["hosts"] = result.num_hosts;
    record["network_groups"] = result.hosts.network_groups;
    record["network_ctas"] = result.hosts.network_ctas;
  }
  record["dense_tflops"] = dense.tflops;
  record["dense_clock_ghz"] = dense.clock_ghz;
  record["clock_ghz"] = result.times.clock_ghz_R;
  append_times(record, result, result.times.forward_ms, result.times.backward_ms);
  append_routing(record, result, dense.tflops);
  if (has_shares(result)) {
    record["exposed_share"] = result.times.forward_rows.exposed_share;
    record["start_share"] = result.times.forward_rows.start_share;
    record["backward_exposed_share"] = result.times.backward_rows.exposed_share;
    record["backward_start_share"] = result.times.backward_rows.start_share;
    record["forward_tail_share"] = result.times.forward_tail_share;
    record["backward_tail_share"] = result.times.backward_tail_share;
    record["peers_awaited_share"] = result.times.peers_awaited_share;
    record["summed_beside_share"] = result.times.summed_beside_share;
  }
  record["forward_stages_ms"] = result.times.forward_stages_ms;
  record["backward_stages_ms"] = result.times.backward_stages_ms;
  append_run(record, run, std::to_string(result.num_ranks) + " x " + cuda_device_name());
  return record;
}

}  // namespace megamoe::bench
