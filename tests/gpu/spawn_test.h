// Tests of this program in a process of their own.
#pragma once

#include <gtest/gtest.h>
#include <spawn.h>
#include <unistd.h>

#include <string>

namespace megamoe {

/// Starts this program for the tests of `filter`, disabled ones too, with `environment`: a process
/// to be waited for, or 0 after a failed expectation.
inline pid_t spawn_test(const std::string& filter, char* const* environment = environ) {
  const std::string option = "--gtest_filter=" + filter;
  const char* arguments[] = {"gpu_test", option.c_str(), "--gtest_also_run_disabled_tests",
                             "--gtest_brief=1", nullptr};
  pid_t process = 0;
  EXPECT_EQ(posix_spawn(&process, "/proc/self/exe", nullptr, nullptr,
                        const_cast<char* const*>(arguments), environment),
            0);
  return process;
}

}  // namespace megamoe
