// Runs tests of the layer on the CUDA backend on two stand-in hosts. A test that takes longer than
// any should ends the program, so that it fails.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>

#include "megamoe/cuda.h"
#include "verify/run.h"

namespace {

constexpr unsigned kDeadlineOfATestS = 240;

class Watch : public testing::EmptyTestEventListener {
 public:
  void OnTestStart(const testing::TestInfo& /*test*/) override {
    alarm(kDeadlineOfATestS);
    if (megamoe::num_cuda_devices() == 0) GTEST_SKIP() << "no CUDA device";
  }
  void OnTestEnd(const testing::TestInfo& /*test*/) override { alarm(0); }
};

}  // namespace

int main(int argc, char** argv) {
  // Up to eight ranks share a device here (docs/cuda.md).
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", /*overwrite=*/0);
  setenv("CUDA_MODULE_LOADING", "EAGER", /*overwrite=*/0);
  megamoe::verify::set_default_backend(megamoe::Backend::cuda);
  megamoe::verify::set_default_num_hosts(2);
  megamoe::verify::set_default_cuda_hosts({.network_groups = 3});
  testing::InitGoogleTest(&argc, argv);
  testing::UnitTest::GetInstance()->listeners().Append(new Watch);
  return RUN_ALL_TESTS();
}
