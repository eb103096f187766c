// `megamoe verify`: a backend against the fp64 oracle, tensor by tensor.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "commands/commands.h"
#include "commands/layer_choices.h"
#include "common/build_info.h"
#include "common/devices.h"
#include "common/json_file.h"
#include "common/launch.h"
#include "verify/problem.h"
#include "verify/run.h"
#include "verify/verify.h"

namespace megamoe::tools {
namespace {

using verify::Comparison;
using verify::ExpertWeight;
using verify::ProblemSpec;
using verify::RoutingPattern;
using verify::RunOptions;

struct VerifyOptions {
  std::int64_t num_tokens = 64;
  int num_ranks = 2;
  ProblemSpec spec;
  RunOptions run;
  std::optional<ExpertWeight> perturbed;
  std::string json_path;
  LaunchOptions launch;
};

constexpr const char* kFooter =
    R"(The oracle is a second, naive evaluation of router and layer that shares no code with the
library. Inputs are random at unit scale, weights at 1/sqrt(fan in), all determined by --seed. A
line a tensor shows the relative norm error and what is allowed: twice the error of the oracle with
bf16 roundings where every backend must round, or, if larger, the rounding of fp32 sums or what the
bf16 roundings behind it can do by half a step each (docs/numerics.md). The same holds in every
slice (token, slot, expert); the line names the one that uses most of its allowance. NaN, infinity,
and anything but 0 where 0 is exact and nothing is rounded on the way, fail.

Tensors: expert_ids and weights [T, K] (router), y and dx [T, H],
dgate and dup [E, I, H], ddown [E, H, I], dweights [T, K], drouter [E, H]; T over all ranks.

Routing patterns:
  uniform     a random router's own choice
  skewed      a bias that draws tokens to the first experts
  one-expert  every slot names the last expert
  duplicates  every second token names its first expert twice
  holes       empty slots: the first, the last or all of a token
  ties        equal logits: every token goes to experts 0 ... K-1

Examples:
  megamoe verify
  megamoe verify --tokens 129 --ranks 4 --routing holes --mode recompute
  megamoe verify --activation clamped-swiglu --weight-gradients accumulate-fp32 --json result.json
  megamoe verify --perturb-weight up        must fail: shows that a wrong weight is found
  megamoe verify --ranks 4 --hosts 2        as if on two hosts, joined by the loopback network
  torchrun --no-python ... megamoe verify --launched     each process is a rank, on any hosts

Exit codes: 0 all tensors agree, 1 one does not (or the run failed), 2 wrong usage.)";

const std::map<std::string, RoutingPattern> kRoutings = {
    {"uniform", RoutingPattern::uniform},       {"skewed", RoutingPattern::skewed},
    {"one-expert", RoutingPattern::one_expert}, {"duplicates", RoutingPattern::duplicates},
    {"holes", RoutingPattern::holes},           {"ties", RoutingPattern::ties}};

const std::map<std::string, ActivationKind> kActivations = {
    {"swiglu", ActivationKind::swiglu},     {"clamped-swiglu", ActivationKind::clamped_swiglu},
    {"gelu-erf", ActivationKind::gelu_erf}, {"gelu-tanh", ActivationKind::gelu_tanh},
    {"relu2", ActivationKind::relu2},       {"identity", ActivationKind::identity}};

const std::map<std::string, Backend> kBackends = {{"cpu", Backend::cpu}, {"cuda", Backend::cuda}};

const std::map<std::string, ExpertWeight> kExpertWeights = {
    {"gate", ExpertWeight::gate}, {"up", ExpertWeight::up}, {"down", ExpertWeight::down}};

template <class Enum>
std::string name_in(const std::map<std::string, Enum>& names, Enum value) {
  const auto found = std::find_if(names.begin(), names.end(),
                                  [&](const auto& entry) { return entry.second == value; });
  return found->first;
}

/// Wrong usage of `option`.
[[noreturn]] void refuse(const std::string& option, const std::string& message) {
  throw CLI::ValidationError(option, message);
}

void check_combination(const VerifyOptions& options) {
  if (options.run.backend == Backend::cpu) refuse_hosts_options_on_cpu(options.run.cuda_hosts);
  const ProblemSpec& spec = options.spec;
  if (options.num_ranks % std::max(1, options.run.num_hosts) != 0) {
    refuse("--hosts", std::to_string(options.num_ranks) + " ranks (--ranks) do not divide among " +
                          std::to_string(options.run.num_hosts) + " hosts");
  }
  if (spec.num_experts % options.num_ranks != 0) {
    refuse("--experts", std::to_string(spec.num_experts) + " experts do not divide among the " +
                            std::to_string(options.num_ranks) + " ranks of --ranks");
  }
  const bool repeats =
      spec.routing == RoutingPattern::duplicates || spec.routing == RoutingPattern::one_expert;
  if (spec.top_k > spec.num_experts && !repeats) {
    refuse("--top-k", std::to_string(spec.top_k) + " different experts of " +
                          std::to_string(spec.num_experts) +
                          " (--experts) do not exist; only --routing duplicates and one-expert "
                          "name an expert more than once");
  }
  if (options.perturbed && options.num_tokens == 0) {
    refuse("--perturb-weight", "no token goes to any expert with --tokens 0");
  }
  if (options.perturbed == ExpertWeight::gate && !is_gated(spec.activation.kind)) {
    refuse("--perturb-weight",
           "--activation " + name_in(kActivations, spec.activation.kind) + " has no gate");
  }
}

/// Memory that the problem and its oracles take, roughly: weights, and per-slot rows of o and dx.
double estimated_gigabytes(const VerifyOptions& options) {
  const ProblemSpec& spec = options.spec;
  const double weights = 3.0 * spec.num_experts * static_cast<double>(spec.hidden_dim) *
                         static_cast<double>(spec.intermediate_dim);
  const double slots = static_cast<double>(options.num_tokens) * options.num_ranks * spec.top_k;
  const double row = 60.0 * static_cast<double>(spec.hidden_dim + spec.intermediate_dim);
  return (50.0 * weights + slots * row) / 1e9;
}

void check_memory(const VerifyOptions& options) {
  const double available = static_cast<double>(sysconf(_SC_PHYS_PAGES)) *
                           static_cast<double>(sysconf(_SC_PAGESIZE)) / 1e9;
  const double needed = estimated_gigabytes(options);
  if (needed <= available) return;
  char text[160];
  std::snprintf(text, sizeof text,
                "verify: the fp64 oracle of this shape needs about %.0f GB, the machine has %.0f; "
                "lower --experts, --hidden, --intermediate or --tokens",
                needed, available);
  throw CommandFailed(text);
}

int num_hosts_of(const VerifyOptions& options) {
  if (options.run.group != nullptr) return options.run.group->topology().num_hosts();
  return options.run.num_hosts;
}

std::string summary(const VerifyOptions& options) {
  const ProblemSpec& spec = options.spec;
  char text[320];
  std::snprintf(text, sizeof text,
                "backend %s, %d ranks on %d host%s x %lld tokens, H=%lld, I=%lld, E=%d, K=%d, %s, "
                "routing %s, mode %s, "
                "weight gradients %s, seed %llu",
                name_in(kBackends, options.run.backend).c_str(), options.num_ranks,
                num_hosts_of(options), num_hosts_of(options) == 1 ? "" : "s",
                static_cast<long long>(options.num_tokens), static_cast<long long>(spec.hidden_dim),
                static_cast<long long>(spec.intermediate_dim), spec.num_experts, spec.top_k,
                name_in(kActivations, spec.activation.kind).c_str(), to_string(spec.routing),
                name_in(kMemoryModes, options.run.memory_mode).c_str(),
                name_in(kWeightGradients, options.run.weight_gradient_mode).c_str(),
                static_cast<unsigned long long>(spec.seed));
  return text;
}

void print_table(const std::vector<Comparison>& comparisons) {
  std::printf("\n%-11s %10s %10s  %-6s  %s\n", "tensor", "error", "allowed", "", "worst slice");
  for (const Comparison& comparison : comparisons) {
    std::printf("%-11s %10.2e %10.2e  %-6s  %s\n", comparison.name.c_str(), comparison.error,
                comparison.allowed, comparison.passed ? "PASS" : "FAIL",
                comparison.worst_slice.c_str());
    if (!comparison.passed) std::printf("%36s^ %s\n", "", comparison.failure.c_str());
  }
  std::printf("\n");
}

nlohmann::ordered_json to_record(const VerifyOptions& options,
                                 const std::vector<Comparison>& comparisons) {
  const ProblemSpec& spec = options.spec;
  nlohmann::ordered_json tensors = nlohmann::ordered_json::array();
  for (const Comparison& comparison : comparisons) {
    tensors.push_back({{"name", comparison.name},
                       {"passed", comparison.passed},
                       {"error", comparison.error},
                       {"allowed", comparison.allowed},
                       {"worst_slice", comparison.worst_slice},
                       {"failure", comparison.failure}});
  }
  return {{"passed", all_passed(comparisons)},
          {"backend", name_in(kBackends, options.run.backend)},
          {"ranks", options.num_ranks},
          {"hosts", num_hosts_of(options)},
          {"network_groups", options.run.cuda_hosts.network_groups},
          {"network_ctas", options.run.cuda_hosts.network_ctas},
          {"tokens_per_rank", options.num_tokens},
          {"hidden", spec.hidden_dim},
          {"intermediate", spec.intermediate_dim},
          {"experts", spec.num_experts},
          {"top_k", spec.top_k},
          {"activation", name_in(kActivations, spec.activation.kind)},
          {"routing", to_string(spec.routing)},
          {"mode", name_in(kMemoryModes, options.run.memory_mode)},
          {"weight_gradients", name_in(kWeightGradients, options.run.weight_gradient_mode)},
          {"seed", spec.seed},
          {"perturbed_weight",
           options.perturbed ? name_in(kExpertWeights, *options.perturbed) : "none"},
          {"commit", build_info().commit},
          {"tensors", tensors}};
}

void run_verify(VerifyOptions options) {
  std::unique_ptr<Communicator> group;
  if (options.launch.is_launched) {
    group = join_launched_group(options.launch);
    options.run.group = group.get();
    options.num_ranks = group->size();
    options.run.num_hosts = 0;
  }
  // Every rank judges all tensors; one speaks.
  const bool is_speaker = group == nullptr || group->rank() == 0;
  check_combination(options);
  check_memory(options);
  require_devices_of(name_in(kBackends, options.run.backend));
  options.spec.tokens_per_rank.assign(options.num_ranks, options.num_tokens);
  std::optional<JsonFile> json;
  if (!options.json_path.empty() && is_speaker) json.emplace(options.json_path);
  if (is_speaker) std::printf("%s\n", summary(options).c_str());
  const std::vector<Comparison> comparisons =
      verify_backend(make_problem(options.spec), options.run, options.perturbed);
  if (is_speaker) print_table(comparisons);
  if (json) json->write(to_record(options, comparisons));
  std::string failed;
  for (const Comparison& comparison : comparisons) {
    if (!comparison.passed) failed += (failed.empty() ? "" : ", ") + comparison.name;
  }
  if (!failed.empty()) throw CommandFailed("verify: FAIL: " + failed);
  if (is_speaker) std::printf("all %zu tensors PASS\n", comparisons.size());
}

/// Turns a name into the number of its enumerator.
template <class Enum>
CLI::Validator choice_of(const std::map<std::string, Enum>& choices) {
  return CLI::Validator(
      [&choices](std::string& text) -> std::string {
        if (const auto found = choices.find(text); found != choices.end()) {
          text = std::to_string(static_cast<int>(found->second));
          return "";
        }
        std::string names;
        for (const auto& [name, value] : choices) names += (names.empty() ? "" : ", ") + name;
        return "'" + text + "' is not one of " + names;
      },
      "", "choice");
}

template <class Enum>
void add_choice(CLI::App& command, const std::string& name, Enum& value,
                const std::map<std::string, Enum>& choices, const std::string& help) {
  command.add_option(name, value, help)
      ->transform(choice_of(choices))
      ->type_name("NAME")
      ->default_str(name_in(choices, value));
}

void add_shape_options(CLI::App& command, VerifyOptions& options) {
  command.add_option("--tokens", options.num_tokens, "Tokens T of each rank")
      ->check(CLI::Range(0, 1 << 20));
  command.add_option("--hidden", options.spec.hidden_dim, "Hidden size H")
      ->check(CLI::Range(1, 1 << 16));
  command.add_option("--intermediate", options.spec.intermediate_dim, "Intermediate size I")
      ->check(CLI::Range(1, 1 << 16));
  command.add_option("--experts", options.spec.num_experts, "Experts E, divisible by --ranks")
      ->check(CLI::Range(1, 1 << 14));
  command.add_option("--top-k", options.spec.top_k, "Slots K of a token")
      ->check(CLI::Range(1, 256));
  command.add_option("--ranks", options.num_ranks, "Ranks, which are threads of this process")
      ->check(CLI::Range(1, 256));
  command
      .add_option(
          "--hosts", options.run.num_hosts,
          "Stand-in hosts: ranks of different ones reach each other by the loopback network")
      ->check(CLI::Range(1, 256));
  command.add_option("--seed", options.spec.seed, "Seed of all random numbers")
      ->check(seed_number());
}

}  // namespace

void add_verify_command(CLI::App& app) {
  const auto options = std::make_shared<VerifyOptions>();
  options->spec.hidden_dim = 128;
  options->spec.intermediate_dim = 128;
  options->spec.activation.limit = 1.0F;
  options->run.num_threads = 0;
  options->run.num_hosts = 1;
  options->run.initial_gradient = 0.5F;
  CLI::App& command =
      *app.add_subcommand("verify", "Check a backend against an fp64 oracle, tensor by tensor");
  command.footer(kFooter);
  command.option_defaults()->always_capture_default();
  add_shape_options(command, *options);
  add_launch_options(command, options->launch);
  add_hosts_options(command, options->run.cuda_hosts);
  command.get_option("--launched")
      ->excludes(command.get_option("--ranks"))
      ->excludes(command.get_option("--hosts"));
  add_choice(command, "--routing", options->spec.routing, kRoutings,
             "uniform, skewed, one-expert, duplicates, holes or ties: see below");
  add_choice(command, "--activation", options->spec.activation.kind, kActivations,
             "swiglu, clamped-swiglu, gelu-erf, gelu-tanh, relu2 or identity");
  command
      .add_option("--activation-limit", options->spec.activation.limit,
                  "Limit of clamped-swiglu; models use about 7, which unit-scale inputs would "
                  "not reach")
      ->check(CLI::PositiveNumber);
  add_choice(command, "--mode", options->run.memory_mode, kMemoryModes,
             "What forward keeps for backward: saved (g and u) or recompute (neither)");
  add_choice(command, "--backend", options->run.backend, kBackends, "cpu or cuda");
  add_choice(command, "--weight-gradients", options->run.weight_gradient_mode, kWeightGradients,
             "store-bf16, store-fp32 or accumulate-fp32 (added into a main_grad)");
  command
      .add_option_function<ExpertWeight>(
          "--perturb-weight", [options](ExpertWeight weight) { options->perturbed = weight; },
          "Self-test: add 1 to one element of gate, up or down for the backend only; must fail")
      ->transform(choice_of(kExpertWeights))
      ->type_name("NAME")
      ->default_str("");
  command.add_option("--json", options->json_path, "Also write the result to this file, as JSON")
      ->type_name("FILE");
  command.callback([options] { run_verify(*options); });
}

}  // namespace megamoe::tools
