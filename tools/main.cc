// The `megamoe` command. Exit codes: 0 success, 1 failure, 2 wrong usage.
#include <CLI/CLI.hpp>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <iostream>
#include <new>
#include <string>

#include "commands/commands.h"
#include "common/build_info.h"

namespace {

std::string join(int argc, char** argv) {
  std::string command_line = "megamoe";
  for (int i = 1; i < argc; ++i) command_line += std::string(" ") + argv[i];
  return command_line;
}

/// What was printed may still be in the buffer, and the disk may be full: results that did not get
/// out are a failure.
int with_output_written(int code) {
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return code;
  std::fprintf(stderr, "megamoe: cannot write to standard output: %s\n", std::strerror(errno));
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  // Ranks that share a GPU wait for each other within kernels: each of their streams needs a queue
  // of its own, and no kernel may have to be loaded meanwhile (docs/cuda.md). Read when CUDA
  // starts; a value that the user has set stays.
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", /*overwrite=*/0);
  setenv("CUDA_MODULE_LOADING", "EAGER", /*overwrite=*/0);
  CLI::App app{
      "megamoe: Mixture-of-Experts training layers with the network behind the tensor cores"};
  // Not CLI11's own check of it: that would hide the name of what is none.
  app.require_subcommand(0, 1);
  app.set_version_flag("--version", "megamoe " + megamoe::tools::build_info().version);
  megamoe::tools::add_info_command(app);
  megamoe::tools::add_bench_command(app, join(argc, argv));
  megamoe::tools::add_trace_command(app, join(argc, argv));
  megamoe::tools::add_train_command(app);
  megamoe::tools::add_verify_command(app);
  try {
    app.parse(argc, argv);
    if (app.get_subcommands().empty()) throw CLI::RequiredError("A subcommand");
  } catch (const CLI::ParseError& error) {
    const int code = app.exit(error);
    std::cout.flush();  // the help goes there
    return code == 0 ? with_output_written(std::cout.good() ? 0 : 1) : 2;
  } catch (const std::bad_alloc&) {
    std::fprintf(stderr, "megamoe: not enough memory on this machine for this shape\n");
    return 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "megamoe: %s\n", error.what());
    return 1;
  }
  return with_output_written(0);
}
