// Runs tests of the layer on the CUDA backend: the cases, the bits, the oracle.
#include <gtest/gtest.h>

#include "megamoe/cuda.h"
#include "verify/run.h"

namespace {

class NeedsDevice : public testing::Environment {
 public:
  void SetUp() override {
    if (megamoe::num_cuda_devices() == 0) GTEST_SKIP() << "no CUDA device";
  }
};

}  // namespace

int main(int argc, char** argv) {
  megamoe::verify::set_default_backend(megamoe::Backend::cuda);
  testing::InitGoogleTest(&argc, argv);
  testing::AddGlobalTestEnvironment(new NeedsDevice);
  return RUN_ALL_TESTS();
}
