// GPU tests skip, and say so, where no device can run them.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include "device/capability.h"

namespace megamoe::testing {

class GpuTest : public ::testing::Test {
 protected:
  void SetUp() override {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) GTEST_SKIP() << "no CUDA device";
    cudaDeviceProp properties{};
    ASSERT_EQ(cudaGetDeviceProperties(&properties, 0), cudaSuccess);
    const device::Capability capability = device::capability_of(properties.major, properties.minor);
    if (!capability.can_run) GTEST_SKIP() << capability.reason;
  }
  void TearDown() override {
    if (!IsSkipped()) {
      EXPECT_EQ(cudaGetLastError(), cudaSuccess);
    }
  }
};

}  // namespace megamoe::testing
