// `megamoe info`: what this machine can run, and why not.
#include <cstdio>
#include <thread>

#include "commands/commands.h"

namespace megamoe::tools {

void add_info_command(CLI::App& app) {
  CLI::App* command = app.add_subcommand("info", "Show devices, what each can run and why not");
  command->callback(
      [] { std::printf("cpu: %u threads, can run\n", std::thread::hardware_concurrency()); });
}

}  // namespace megamoe::tools
