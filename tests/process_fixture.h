// Ranks as processes of a test.
#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "megamoe/error.h"

namespace megamoe {

inline std::string unique_name() {
  static int number = 0;
  return "test." + std::to_string(getpid()) + "." + std::to_string(number++);
}

/// Runs `rank_main` in a process a rank and returns their wait statuses. A child that throws exits
/// with 9; one that finds a wrong value calls expect().
inline std::vector<int> run_processes(
    int num_ranks, const std::function<void(const std::string&, int)>& rank_main) {
  const std::string name = unique_name();
  std::vector<pid_t> children;
  for (int rank = 0; rank < num_ranks; ++rank) {
    const pid_t child = fork();
    if (child == 0) {
      try {
        rank_main(name, rank);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
        _exit(9);
      }
      _exit(0);
    }
    children.push_back(child);
  }
  std::vector<int> statuses(num_ranks);
  for (int rank = 0; rank < num_ranks; ++rank) waitpid(children[rank], &statuses[rank], 0);
  return statuses;
}

/// In a child GoogleTest's own macros would report to nobody.
inline void expect(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "expectation failed: %s\n", what);
  _exit(8);
}

/// In a rank's process: runs `work` in a child of it, which must end by itself.
inline void expect_child_ends(const std::function<void()>& work) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    work();
    _exit(0);
  }
  int status = -1;
  waitpid(child, &status, 0);
  expect(status == 0, "the child ends");
}

inline void expect_all_succeed(const std::vector<int>& statuses) {
  for (std::size_t rank = 0; rank < statuses.size(); ++rank) {
    EXPECT_TRUE(WIFEXITED(statuses[rank]) && WEXITSTATUS(statuses[rank]) == 0) << "rank " << rank;
  }
}

template <class Work>
Error error_of(Work&& work) {
  try {
    work();
  } catch (const Error& error) {
    return error;
  }
  return {ErrorCode::internal, "no error was thrown"};
}

inline bool contains(const Error& error, const char* text) {
  return std::string(error.what()).find(text) != std::string::npos;
}

}  // namespace megamoe
