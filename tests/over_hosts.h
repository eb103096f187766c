// For programs that run the layer's tests again on several hosts.
#pragma once

#include <gtest/gtest.h>

#include "verify/run.h"

namespace megamoe::verify {

/// A test that has passed without any ranks on several hosts, because it has one rank only, counts
/// as skipped: it has shown nothing about hosts.
class OverHosts : public testing::EmptyTestEventListener {
 public:
  void OnTestStart(const testing::TestInfo& /*test*/) override {
    num_before_ = num_groups_over_hosts();
  }
  void OnTestEnd(const testing::TestInfo& test) override {
    if (test.result()->Passed() && num_groups_over_hosts() == num_before_) {
      GTEST_SKIP() << "has no ranks on several hosts";
    }
  }

 private:
  int num_before_ = 0;
};

}  // namespace megamoe::verify
