// The subcommands of the `megamoe` command. Each function adds one to the application; its callback
// does the work and throws: CLI::Error for wrong usage (exit code 2), megamoe::Error or
// CommandFailed for a failure (exit code 1).
#pragma once

#include <CLI/CLI.hpp>
#include <stdexcept>
#include <string>

namespace megamoe::tools {

/// A failure that the command has explained in its message; exit code 1.
class CommandFailed : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// CLI11 alone takes -1 for 2^64 - 1, and what does not fit 64 bits for the largest that does.
CLI::Validator seed_number();

void add_info_command(CLI::App& app);
/// `command_line` is the whole of it, for the record.
void add_bench_command(CLI::App& app, const std::string& command_line);
/// `command_line` as above.
void add_trace_command(CLI::App& app, const std::string& command_line);
void add_train_command(CLI::App& app);
void add_verify_command(CLI::App& app);

}  // namespace megamoe::tools
