// How many ranks may share a GPU, by its hardware queues.
#include "comm/hardware_queues.h"

#include <gtest/gtest.h>

#include <cstdlib>

#include "layer_fixture.h"

namespace megamoe::verify {
namespace {

constexpr const char* kVariable = "CUDA_DEVICE_MAX_CONNECTIONS";

class HardwareQueues : public testing::Test {
 protected:
  void SetUp() override { unsetenv(kVariable); }
  void TearDown() override { unsetenv(kVariable); }
};

TEST_F(HardwareQueues, AreTheVariablesWhereCudaTakesItAndOtherwiseEight) {
  EXPECT_EQ(hardware_queues(), 8);
  for (const auto& [text, queues] : {std::pair{"1", 1},
                                     {"16", 16},
                                     {"32", 32},
                                     {"0", 8},
                                     {"33", 8},
                                     {"", 8},
                                     {"12x", 8},
                                     {"-4", 8}}) {
    setenv(kVariable, text, 1);
    EXPECT_EQ(hardware_queues(), queues) << "'" << text << "'";
  }
}

TEST_F(HardwareQueues, AreTwoForEachRankThatSharesADevice) {
  EXPECT_NO_THROW(require_hardware_queues(4, 0));
  expect_error(
      ErrorCode::unsupported,
      {"5 ranks share CUDA device 3", "need 10", "it has 8", "CUDA_DEVICE_MAX_CONNECTIONS to 10"},
      [] { require_hardware_queues(5, 3); });
  setenv(kVariable, "10", 1);
  EXPECT_NO_THROW(require_hardware_queues(5, 3));
  setenv(kVariable, "1", 1);  // as some training frameworks set it
  EXPECT_NO_THROW(require_hardware_queues(1, 0));
  expect_error(ErrorCode::unsupported, {"2 ranks", "it has 1"},
               [] { require_hardware_queues(2, 0); });
}

TEST_F(HardwareQueues, NoVariableServesMoreThanSixteenRanks) {
  setenv(kVariable, "32", 1);
  EXPECT_NO_THROW(require_hardware_queues(16, 0));
  expect_error(ErrorCode::unsupported, {"17 ranks", "need 34", "at most 32, for 16 ranks"},
               [] { require_hardware_queues(17, 0); });
}

}  // namespace
}  // namespace megamoe::verify
