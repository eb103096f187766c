// `megamoe bench`: times the layer, or a step through several, beside the machine's measured peak.
#include <algorithm>
#include <cstdio>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bench/product_bench.h"
#include "bench/report.h"
#include "bench/step_report.h"
#include "commands/commands.h"
#include "commands/layer_choices.h"
#include "common/devices.h"
#include "common/json_file.h"
#include "common/launch.h"
#include "common/machine.h"
#include "cpu/fma_peak.h"

namespace megamoe::tools {
namespace {

struct BenchOptions {
  std::vector<std::string> shapes = {"qwen3-30b/4", "qwen3-235b/4", "deepseek-v3/8"};
  std::int64_t num_tokens = 512;
  int num_ranks = 2;
  int num_threads = 0;
  std::string backend = "cpu";
  LayerChoices layer;
  std::string routing = "uniform";
  int num_repeats = 7;
  bool times_steps = false;
  std::int64_t num_layers = 4;
  std::uint64_t seed = 1;
  std::string json_path;
  LaunchOptions launch;
  CudaHostsOptions hosts;
};

constexpr const char* kFooter =
    "Each pass is timed from the moment that all ranks are ready until the last has finished:\n"
    "median and [fastest, slowest]. GFLOP/s are 6*N*H*I (forward) and 12*N*H*I (backward) of all\n"
    "ranks together, N rows; also with --mode recompute, which does 16. The slowest rank decides: "
    "what\n"
    "the rows of the busiest one take at the peak is told beside.\n"
    "  megamoe bench --shape qwen3-30b --tokens 1024 --ranks 4 --json result.json\n"
    "With --step, forward through --layers layers and backward through them, each with weights "
    "and\n"
    "gradients of its own, with and without overlap on cuda, beside one of the layers alone:\n"
    "  megamoe bench --step --layers 4 --shape qwen3-30b --tokens 8192 --backend cuda\n"
    "With --launched each process is a rank, on any hosts, with a GPU each; rank 0 speaks:\n"
    "  torchrun --no-python ... megamoe bench --launched --backend cuda --tokens 8192";

/// Throws what CLI11 reports as wrong usage of `option`.
[[noreturn]] void refuse(const std::string& option, const std::string& message) {
  throw CLI::ValidationError(option, message);
}

LayerConfig layer_config(const BenchOptions& options, const bench::NamedShape& named) {
  LayerConfig config;
  config.shape = named.shape;
  config.shape.max_tokens = options.num_tokens;
  options.layer.apply_to(config);
  config.num_threads = options.num_threads;
  if (config.shape.num_experts % options.num_ranks != 0) {
    refuse("--ranks", named.name + " has " + std::to_string(config.shape.num_experts) +
                          " experts, which do not divide among " +
                          std::to_string(options.num_ranks) + " ranks");
  }
  return config;
}

int total_threads(const BenchOptions& options) {
  const int cores = num_cpu_threads();
  const int per_rank =
      options.num_threads > 0 ? options.num_threads : std::max(1, cores / options.num_ranks);
  return std::min(cores, per_rank * options.num_ranks);
}

bench::Ceiling measure_ceiling(const BenchOptions& options) {
  bench::Ceiling ceiling{cpu::measure_fma_peak_gflops(), total_threads(options), {}};
  for (const std::int64_t dim : {512, 1024}) {
    ceiling.products.push_back({dim, bench::product_gflops(dim)});
  }
  return ceiling;
}

std::vector<std::vector<std::int32_t>> routing_of(const BenchOptions& options,
                                                  const LayerConfig& config) {
  return bench::routing_ids(bench::parse_routing(options.routing), config.shape, options.num_tokens,
                            options.num_ranks, options.seed);
}

/// With room for what the busiest rank receives.
LayerConfig with_capacity(LayerConfig config, int num_ranks, const bench::BusiestRows& busiest) {
  config.row_capacity = std::max(resolved_row_capacity(config, num_ranks), busiest.of_rank);
  return config;
}

std::int64_t num_rows_of(const BenchOptions& options, const LayerConfig& config) {
  return options.num_ranks * options.num_tokens * config.shape.top_k;
}

bench::LayerResult measure_layer(const BenchOptions& options, const std::string& name,
                                 const LayerConfig& config) {
  const std::vector<std::vector<std::int32_t>> ids_RTK = routing_of(options, config);
  const bench::BusiestRows busiest = bench::count_busiest(config.shape, ids_RTK);
  return {name,
          config,
          options.num_ranks,
          num_rows_of(options, config),
          bench::parse_routing(options.routing),
          busiest,
          bench::time_layer(with_capacity(config, options.num_ranks, busiest), ids_RTK,
                            options.num_repeats),
          bench::count_traffic(config.shape, ids_RTK)};
}

using Layers = std::vector<std::pair<std::string, LayerConfig>>;

nlohmann::ordered_json run_on_cpu(const BenchOptions& options, const Layers& layers,
                                  const bench::RunInfo& run) {
  const bench::Ceiling ceiling = measure_ceiling(options);
  bench::print_ceiling(ceiling);
  nlohmann::ordered_json records = nlohmann::ordered_json::array();
  for (const auto& [name, config] : layers) {
    const bench::LayerResult result = measure_layer(options, name, config);
    bench::print_result(result, ceiling);
    std::fflush(stdout);
    records.push_back(bench::to_record(result, ceiling, run));
  }
  return records;
}

/// `launched` is null where ranks are threads.
nlohmann::ordered_json run_on_cuda(const BenchOptions& options, const Layers& layers,
                                   const bench::RunInfo& run, Communicator* launched) {
  const bool speaks = launched == nullptr || launched->rank() == 0;
  nlohmann::ordered_json records = nlohmann::ordered_json::array();
  const bench::DenseRate dense = bench::dense_rate(options.num_ranks, launched);
  if (speaks) {
    if (launched != nullptr) std::printf("%s\n", launched->topology().describe().c_str());
    std::printf("%d x %s, dense bf16 8192^3: ", options.num_ranks,
                bench::cuda_device_name().c_str());
    if (dense.tflops > 0) {
      std::printf("%.1f TFLOP/s = P, at %.2f GHz\n", dense.tflops, dense.clock_ghz);
    } else {
      std::printf("not measured (no cuBLAS)\n");
    }
  }
  for (const auto& [name, layer] : layers) {
    LayerConfig config = layer;
    config.backend = Backend::cuda;
    const std::vector<std::vector<std::int32_t>> ids_RTK = routing_of(options, config);
    const bench::BusiestRows busiest = bench::count_busiest(config.shape, ids_RTK);
    const bench::CudaLayerResult result{
        name,
        config,
        options.num_ranks,
        launched == nullptr ? 1 : launched->topology().num_hosts(),
        options.hosts,
        num_rows_of(options, config),
        bench::parse_routing(options.routing),
        busiest,
        bench::time_layer_on_cuda(with_capacity(config, options.num_ranks, busiest), ids_RTK,
                                  options.num_repeats, launched, options.hosts)};
    if (!speaks) continue;
    bench::print_cuda_result(result, dense.tflops);
    std::fflush(stdout);
    records.push_back(bench::to_cuda_record(result, dense, run));
  }
  return records;
}

bench::StepResult measure_step(const BenchOptions& options, const std::string& name,
                               const LayerConfig& config) {
  const std::vector<std::vector<std::int32_t>> ids_RTK = routing_of(options, config);
  const bench::StepProblem problem = {
      with_capacity(config, options.num_ranks, bench::count_busiest(config.shape, ids_RTK)),
      options.num_layers, ids_RTK};
  const auto time =
      config.backend == Backend::cuda ? bench::time_step_on_cuda : bench::time_step_on_cpu;
  return {name,
          config,
          options.num_ranks,
          options.num_layers,
          num_rows_of(options, config),
          bench::step_state(config, options.num_ranks, options.num_layers),
          time(problem, options.num_repeats)};
}

/// The CPU has one order of a call; on GPUs both are timed.
nlohmann::ordered_json run_steps(const BenchOptions& options, const Layers& layers,
                                 const bench::RunInfo& run) {
  const bool on_cuda = options.backend == "cuda";
  const double dense_tflops = on_cuda ? bench::dense_rate(options.num_ranks).tflops : 0.0;
  const std::string hardware =
      on_cuda ? std::to_string(options.num_ranks) + " x " + bench::cuda_device_name()
              : processor_name() + ", " + std::to_string(num_cpu_threads()) + " threads";
  std::printf("%s\n", hardware.c_str());
  nlohmann::ordered_json records = nlohmann::ordered_json::array();
  for (const auto& [name, layer] : layers) {
    for (const Overlap overlap : {Overlap::on, Overlap::off}) {
      if (!on_cuda && overlap == Overlap::off) continue;
      LayerConfig config = layer;
      config.backend = on_cuda ? Backend::cuda : Backend::cpu;
      config.overlap = overlap;
      const bench::StepResult result = measure_step(options, name, config);
      bench::print_step(result, dense_tflops);
      std::fflush(stdout);
      records.push_back(bench::to_step_record(result, dense_tflops, run, hardware));
    }
  }
  return records;
}

void run_bench(BenchOptions options, const std::string& command_line) {
  if (options.backend == "cpu") refuse_hosts_options_on_cpu(options.hosts);
  std::unique_ptr<Communicator> launched;
  if (options.launch.is_launched) {
    if (options.backend != "cuda") refuse("--launched", "times layers on GPUs: --backend cuda");
    launched = join_launched_group(options.launch);
    options.num_ranks = launched->size();
  }
  const bool speaks = launched == nullptr || launched->rank() == 0;
  // Every option is checked before the first measurement.
  Layers layers;
  for (const std::string& text : options.shapes) {
    try {
      const bench::NamedShape named = bench::parse_shape(text);
      layers.emplace_back(named.name, layer_config(options, named));
    } catch (const std::invalid_argument& error) {
      refuse("--shape", error.what());
    }
  }
  require_devices_of(options.backend);
  std::optional<JsonFile> json_file;
  if (!options.json_path.empty() && speaks) json_file.emplace(options.json_path);

  const bench::RunInfo run = bench::run_info(command_line);
  const nlohmann::ordered_json records = options.times_steps ? run_steps(options, layers, run)
                                         : options.backend == "cuda"
                                             ? run_on_cuda(options, layers, run, launched.get())
                                             : run_on_cpu(options, layers, run);
  if (json_file) json_file->write(records);
}

}  // namespace

void add_bench_command(CLI::App& app, const std::string& command_line) {
  const auto options = std::make_shared<BenchOptions>();
  CLI::App* command = app.add_subcommand(
      "bench", "Time forward and backward of the layer beside the machine's peak");
  command->footer(kFooter);
  command
      ->add_option("--shape", options->shapes,
                   "Layers: qwen3-30b, qwen3-235b, deepseek-v3, mixtral-8x7b, qwen2-57b, "
                   "qwen1.5-moe; with /D a layer whose hidden, intermediate and experts are "
                   "divided by D")
      ->capture_default_str();
  command
      ->add_option("--backend", options->backend,
                   "cpu: ranks are threads; cuda: ranks have a GPU each, or share one")
      ->check(CLI::IsMember({"cpu", "cuda"}))
      ->capture_default_str();
  add_layer_choices(*command, options->layer);
  command->add_option("--tokens", options->num_tokens, "Tokens of each rank")
      ->check(CLI::Range(1, 1 << 24))
      ->capture_default_str();
  CLI::Option* ranks =
      command->add_option("--ranks", options->num_ranks, "Ranks, which are threads of this process")
          ->check(CLI::Range(1, 64))
          ->capture_default_str();
  command
      ->add_option("--threads", options->num_threads,
                   "Threads of each rank; 0 divides the machine's cores among the ranks")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str();
  command
      ->add_option(
          "--routing", options->routing,
          "uniform; zipf: experts drawn with odds 1, 1/2, 1/3, ...; one-expert: every slot "
          "names the last expert")
      ->check(CLI::IsMember({"uniform", "zipf", "one-expert"}))
      ->capture_default_str();
  CLI::Option* steps =
      command->add_flag("--step", options->times_steps,
                        "Time a training step through a stack of layers in place of one layer");
  command->add_option("--layers", options->num_layers, "Layers of the stack")
      ->needs(steps)
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  command->add_option("--repeats", options->num_repeats, "Timed passes, after one that is not")
      ->check(CLI::Range(1, 10000))
      ->capture_default_str();
  command->add_option("--seed", options->seed, "Seed of the routing")
      ->check(seed_number())
      ->capture_default_str();
  command->add_option("--json", options->json_path, "Also write the records to this file, as JSON");
  add_launch_options(*command, options->launch);
  add_hosts_options(*command, options->hosts);
  for (const char* name : {"--network-groups", "--network-ctas"}) {
    command->get_option(name)->needs(command->get_option("--launched"));
  }
  command->get_option("--launched")->excludes(ranks)->excludes(steps);
  command->callback([options, command_line] { run_bench(*options, command_line); });
}

}  // namespace megamoe::tools
