// The `megamoe` command. Exit codes: 0 success, 1 failure, 2 wrong usage.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <string>

#include "commands/commands.h"

namespace {

std::string join(int argc, char** argv) {
  std::string command_line = "megamoe";
  for (int i = 1; i < argc; ++i) command_line += std::string(" ") + argv[i];
  return command_line;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{
      "megamoe: Mixture-of-Experts training layers with the network behind the tensor cores"};
  app.require_subcommand(1);
  megamoe::tools::add_info_command(app);
  megamoe::tools::add_bench_command(app, join(argc, argv));
  megamoe::tools::add_train_command(app);
  megamoe::tools::add_verify_command(app);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    const int code = app.exit(error);
    return code == 0 ? 0 : 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "megamoe: %s\n", error.what());
    return 1;
  }
  return 0;
}
