// What the network between hosts costs a layer of the CUDA backend: how fast messages travel, and
// what forward and backward take, with and without overlap, beside what their products take by
// themselves (in calls without overlap) and their bytes at the bandwidth of large messages.
//
// Without --launched it starts two processes, stand-in hosts with a GPU each, which see each other
// by NCCL's sockets on the loopback interface alone.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <string>

#include "common/launch.h"
#include "options.h"
#include "run.h"
#include "stand_ins.h"

int main(int argc, char** argv) {
  megamoe::bench::Options options;
  CLI::App app("What the network between hosts costs a layer on GPUs");
  app.option_defaults()->always_capture_default();
  app.add_option("--tokens", options.shape.max_tokens, "Tokens of each rank");
  app.add_option("--hidden", options.shape.hidden_dim, "Hidden size H");
  app.add_option("--intermediate", options.shape.intermediate_dim, "Intermediate size I");
  app.add_option("--experts", options.shape.num_experts, "Experts E");
  app.add_option("--top-k", options.shape.top_k, "Slots K of a token");
  app.add_option("--groups", options.groups, "Groups of experts with overlap; 0: as by default");
  app.add_option("--ctas", options.ctas, "CTAs of a transfer");
  app.add_option("--sizes", options.sizes_tokens,
                 "Tokens of each rank for which exact and padded messages are compared");
  app.add_option("--repeats", options.num_repeats, "Timed passes")->check(CLI::Range(1, 10000));
  app.add_option("--pause-ms", options.pause_ms, "Rest before each timed pass")
      ->check(CLI::Range(0, 60000));
  app.add_option("--json", options.json_path, "Also write records to this file");
  app.add_option("--trace", options.trace_path,
                 "Write timelines of both streams to FILE.<groups>.{forward,backward}.json");
  megamoe::tools::add_launch_options(app, options.launch);
  CLI11_PARSE(app, argc, argv);
  for (int i = 0; i < argc && std::string(argv[i]) != "--launched"; ++i) {
    options.command += (i > 0 ? " " : "") + std::string(argv[i]);
  }
  try {
    if (!options.launch.is_launched) return megamoe::bench::run_stand_ins(argc, argv);
    const auto hosts = megamoe::tools::join_launched_group(options.launch);
    megamoe::bench::run_rank(options, *hosts);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "hosts_bench: %s\n", error.what());
    return 1;
  }
  return 0;
}
