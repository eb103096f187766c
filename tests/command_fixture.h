// Runs the `megamoe` command as its users do.
#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

namespace megamoe {

struct Outcome {
  int exit_code;
  std::string out;
  std::string err;
};

inline std::string read_file(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

class Command : public testing::Test {
 protected:
  Command()
      : directory_(std::filesystem::temp_directory_path() /
                   ("megamoe_cli_test_" + std::to_string(getpid()))) {
    std::filesystem::create_directories(directory_);
    // The tests themselves may run under a launcher.
    for (const char* name :
         {"RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK",
          "PMI_SIZE", "SLURM_PROCID", "SLURM_NTASKS", "MASTER_ADDR", "MASTER_PORT"}) {
      unsetenv(name);
    }
  }
  ~Command() override { std::filesystem::remove_all(directory_); }

  /// Runs the command with these arguments, which a shell splits, and these variables set.
  [[nodiscard]] Outcome run(const std::string& arguments,
                            const std::string& environment = "") const {
    const auto out = directory_ / "out";
    const auto err = directory_ / "err";
    const std::string line = environment + " " MEGAMOE_COMMAND " " + arguments + " >" +
                             out.string() + " 2>" + err.string() + " </dev/null";
    const int status = std::system(line.c_str());  // NOLINT(cert-env33-c): this is a test
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, read_file(out), read_file(err)};
  }

  std::filesystem::path directory_;
};

}  // namespace megamoe
