// `megamoe trace`: records one pass of the layer on GPUs, and tells which role waited for what.
#include <algorithm>
#include <cstdio>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "bench/routing.h"
#include "bench/shapes.h"
#include "commands/commands.h"
#include "commands/layer_choices.h"
#include "common/json_file.h"
#include "trace/chrome_json.h"
#include "trace/record.h"
#include "trace/summary.h"

namespace megamoe::tools {
namespace {

struct TraceOptions {
  std::string shape = "qwen3-30b";
  std::int64_t num_tokens = 8192;
  int num_ranks = 2;
  std::string pass = "forward";
  LayerChoices layer;
  std::string routing = "uniform";
  std::uint64_t seed = 1;
  int num_sms = 8;
  std::string path;
};

constexpr const char* kFooter =
    "Needs a build with MEGAMOE_CUDA and MEGAMOE_TRACE, whose kernels are some percent slower. "
    "After\n"
    "passes that warm up one is recorded. The file opens in ui.perfetto.dev: a process a GPU, "
    "threads\n"
    "for each SM and role. The table counts all SMs. docs/tracing.md says what the spans mean.\n"
    "  megamoe trace --shape qwen3-235b --pass backward --out trace.json";

LayerConfig layer_config(const TraceOptions& options) {
  LayerConfig config;
  config.backend = Backend::cuda;
  try {
    config.shape = bench::parse_shape(options.shape).shape;
  } catch (const std::invalid_argument& error) {
    throw CLI::ValidationError("--shape", error.what());
  }
  config.shape.max_tokens = options.num_tokens;
  options.layer.apply_to(config);
  if (config.shape.num_experts % options.num_ranks != 0) {
    throw CLI::ValidationError("--ranks", options.shape + " has " +
                                              std::to_string(config.shape.num_experts) +
                                              " experts, which do not divide among " +
                                              std::to_string(options.num_ranks) + " ranks");
  }
  return config;
}

void run_trace(const TraceOptions& options, const std::string& command_line) {
  LayerConfig config = layer_config(options);
  JsonFile file(options.path);
  if (!timeline::can_record()) {
    throw CommandFailed(
        "trace: the kernels of this build record nothing. Build the command with\n"
        "  cmake --preset cuda -B build/trace -DMEGAMOE_TRACE=ON\n"
        "  cmake --build build/trace --target megamoe_command\n"
        "and run build/trace/bin/megamoe (needs nvcc 13 and a Hopper GPU)");
  }
  const auto ids_RTK = bench::routing_ids(bench::parse_routing(options.routing), config.shape,
                                          options.num_tokens, options.num_ranks, options.seed);
  config.row_capacity = std::max(resolved_row_capacity(config, options.num_ranks),
                                 bench::count_busiest(config.shape, ids_RTK).of_rank);
  const std::vector<timeline::GpuTimeline> gpus = timeline::record_pass(
      config, ids_RTK,
      options.pass == "forward" ? timeline::Pass::forward : timeline::Pass::backward);
  std::vector<timeline::KernelSummary> summaries;
  for (const timeline::GpuTimeline& gpu : gpus) {
    for (const timeline::KernelRun& kernel : gpu.kernels) {
      summaries.push_back(timeline::summarize(kernel, gpu.rank));
    }
  }
  std::printf("%s", timeline::to_table(summaries).c_str());
  for (const timeline::GpuTimeline& gpu : gpus) {
    if (options.pass != "backward") break;
    std::printf(
        "\nGPU of rank %d: %.1f%% of the time in which other ranks push dx rows lies under its "
        "weight gradients\n",
        gpu.rank, 100.0 * timeline::share_under_weight_gradients(gpus, gpu.rank));
  }
  nlohmann::ordered_json json = timeline::to_chrome_json(gpus, options.num_sms);
  json["otherData"] = {{"command", command_line}, {"summary", timeline::to_json(summaries)}};
  file.write(json);
}

}  // namespace

void add_trace_command(CLI::App& app, const std::string& command_line) {
  const auto options = std::make_shared<TraceOptions>();
  CLI::App* command =
      app.add_subcommand("trace", "Record what each role of the kernels does on each SM of a GPU");
  command->footer(kFooter);
  command->add_option("--shape", options->shape, "A layer, as in bench")->capture_default_str();
  command->add_option("--tokens", options->num_tokens, "Tokens of each rank")
      ->check(CLI::Range(1, 1 << 24))
      ->capture_default_str();
  command->add_option("--ranks", options->num_ranks, "Ranks, with a GPU each, or sharing one")
      ->check(CLI::Range(1, 64))
      ->capture_default_str();
  command->add_option("--pass", options->pass, "forward or backward")
      ->check(CLI::IsMember({"forward", "backward"}))
      ->capture_default_str();
  add_layer_choices(*command, options->layer);
  command->add_option("--routing", options->routing, "As in bench")
      ->check(CLI::IsMember({"uniform", "zipf", "one-expert"}))
      ->capture_default_str();
  command->add_option("--seed", options->seed, "Seed of the routing")
      ->check(seed_number())
      ->capture_default_str();
  command
      ->add_option("--sms", options->num_sms,
                   "SMs of each GPU whose threads are written, spread over the GPU; 0: all")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str();
  command->add_option("--out", options->path, "The file to write")->required();
  command->callback([options, command_line] { run_trace(*options, command_line); });
}

}  // namespace megamoe::tools
