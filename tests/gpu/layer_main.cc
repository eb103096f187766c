// Runs tests on the CUDA backend: those of the layer (the cases, the bits, the oracle), or of the
// trainer.
#include <gtest/gtest.h>

#include <cstdlib>

#include "megamoe/cuda.h"
#include "verify/run.h"

namespace {

/// Skips each test where there is no device, so that it is counted as skipped. (An environment that
/// skips lets the tests pass without having run.)
class NeedsDevice : public testing::EmptyTestEventListener {
 public:
  void OnTestStart(const testing::TestInfo& /*test*/) override {
    if (megamoe::num_cuda_devices() == 0) GTEST_SKIP() << "no CUDA device";
  }
};

}  // namespace

int main(int argc, char** argv) {
  // Up to eight ranks share a device here: a group asks for two queues a rank, and replays want all
  // kernels loaded (docs/cuda.md).
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", /*overwrite=*/0);
  setenv("CUDA_MODULE_LOADING", "EAGER", /*overwrite=*/0);
  megamoe::verify::set_default_backend(megamoe::Backend::cuda);
  testing::InitGoogleTest(&argc, argv);
  testing::UnitTest::GetInstance()->listeners().Append(new NeedsDevice);
  return RUN_ALL_TESTS();
}
