#include "bench/step_report.h"

#include <cstdio>

namespace megamoe::bench {
namespace {

/// Of all layers, a rank's share: 18*N*H*I for each, also where products are computed again.
double step_tflops(const StepResult& result, double step_ms) {
  const MoeShape& shape = result.config.shape;
  const double flops =
      static_cast<double>(result.num_layers) *
      (forward_flops(result.num_rows, shape) + backward_flops(result.num_rows, shape));
  return flops / step_ms * 1e-9 / result.num_ranks;
}

bool overlaps(const StepResult& result) {
  return result.config.backend == Backend::cuda && result.config.overlap == Overlap::on;
}

}  // namespace

void print_step(const StepResult& result, double dense_tflops) {
  const MoeShape& shape = result.config.shape;
  std::printf(
      "\n%s, %lld layers: hidden %lld, intermediate %lld, experts %d, top-k %d; %d ranks of %lld "
      "tokens, %s, weight gradients %s, %s\n",
      result.shape_name.c_str(), static_cast<long long>(result.num_layers),
      static_cast<long long>(shape.hidden_dim), static_cast<long long>(shape.intermediate_dim),
      shape.num_experts, shape.top_k, result.num_ranks, static_cast<long long>(shape.max_tokens),
      to_text(result.config.memory_mode), to_text(result.config.weight_gradient_mode),
      overlaps(result) ? "overlap on" : "overlap off");
  std::printf(
      "  a rank: %.2f GB (weights %.2f, gradients %.2f, activations %.2f, g and u %.2f, "
      "workspace %.2f)\n",
      gigabytes(result.state.total()), gigabytes(result.state.weights),
      gigabytes(result.state.weight_gradients), gigabytes(result.state.activations),
      gigabytes(result.state.kept), gigabytes(result.state.workspace));
  const Summary step = summarize(result.times.step.total_ms());
  const Summary one = summarize(result.times.one_layer.total_ms());
  const double layers = static_cast<double>(result.num_layers);
  const double tflops = step_tflops(result, step.median_ms);
  std::printf("  step      %8.3f ms [%.3f, %.3f]  %.1f TFLOP/s", step.median_ms, step.min_ms,
              step.max_ms, tflops);
  if (dense_tflops > 0) std::printf("  %.3f P", tflops / dense_tflops);
  std::printf("\n  forward   %8.3f ms, backward %.3f ms; a layer of it %.3f ms\n",
              summarize(result.times.step.forward_ms).median_ms,
              summarize(result.times.step.backward_ms).median_ms, step.median_ms / layers);
  std::printf("  one layer %8.3f ms [%.3f, %.3f]; the step is %.3f times as long as %lld of it\n",
              one.median_ms, one.min_ms, one.max_ms, step.median_ms / (layers * one.median_ms),
              static_cast<long long>(result.num_layers));
}

nlohmann::ordered_json to_step_record(const StepResult& result, double dense_tflops,
                                      const RunInfo& run, const std::string& hardware) {
  const Summary step = summarize(result.times.step.total_ms());
  const Summary one = summarize(result.times.one_layer.total_ms());
  const double layers = static_cast<double>(result.num_layers);
  nlohmann::ordered_json record = {
      {"layer", "megamoe"},
      {"benchmark", "step"},
      {"backend", result.config.backend == Backend::cuda ? "cuda" : "cpu"},
      {"path", overlaps(result) ? "fused" : "sequential"},
      {"mode", to_text(result.config.memory_mode)},
      {"weight_gradients", to_text(result.config.weight_gradient_mode)}};
  append_layer(record, result.shape_name, result.config.shape, result.num_ranks);
  record["layers"] = result.num_layers;
  record["dense_tflops"] = dense_tflops;
  record["step_ms"] = step.median_ms;
  record["step_ms_range"] = {step.min_ms, step.max_ms};
  record["forward_ms"] = summarize(result.times.step.forward_ms).median_ms;
  record["backward_ms"] = summarize(result.times.step.backward_ms).median_ms;
  record["layer_ms"] = step.median_ms / layers;
  record["one_layer_ms"] = one.median_ms;
  record["one_layer_ms_range"] = {one.min_ms, one.max_ms};
  record["step_over_layers_alone"] = step.median_ms / (layers * one.median_ms);
  record["step_tflops"] = step_tflops(result, step.median_ms);
  record["state_bytes"] = {{"total", result.state.total()},
                           {"weights", result.state.weights},
                           {"weight_gradients", result.state.weight_gradients},
                           {"activations", result.state.activations},
                           {"kept", result.state.kept},
                           {"workspace", result.state.workspace}};
  append_run(record, run, hardware);
  return record;
}

}  // namespace megamoe::bench
