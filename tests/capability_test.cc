// What `megamoe info` says about devices, with mocked compute capabilities.
#include "device/capability.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>

namespace megamoe::device {
namespace {

bool says(const Capability& capability, const char* words) {
  return capability.reason.find(words) != std::string::npos;
}

TEST(Capability, HopperRuns) {
  const Capability hopper = capability_of(9, 0);
  EXPECT_TRUE(hopper.can_run);
  EXPECT_TRUE(says(hopper, "9.0"));
}

TEST(Capability, BelowHopperIsRefusedForTmaAndWgmma) {
  for (const int minor : {0, 9}) {
    const Capability older = capability_of(8, minor);
    EXPECT_FALSE(older.can_run);
    EXPECT_TRUE(says(older, minor == 0 ? "8.0" : "8.9"));
    EXPECT_TRUE(says(older, "neither TMA nor wgmma"));
    EXPECT_TRUE(says(older, "CPU backend"));
  }
}

TEST(Capability, DatacenterBlackwellIsNotWrittenYet) {
  const Capability blackwell = capability_of(10, 0);
  EXPECT_FALSE(blackwell.can_run);
  EXPECT_TRUE(says(blackwell, "10.0"));
  EXPECT_TRUE(says(blackwell, "not written yet"));
}

TEST(Capability, ConsumerBlackwellHasTmaButNoTensorCoreInstructionOfOurs) {
  const Capability consumer = capability_of(12, 0);
  EXPECT_FALSE(consumer.can_run);
  EXPECT_TRUE(says(consumer, "12.0"));
  EXPECT_TRUE(says(consumer, "neither wgmma nor tcgen05"));
}

TEST(Capability, UnknownDevicesAreRefused) { EXPECT_FALSE(capability_of(13, 0).can_run); }

TEST(Capability, WhereverKernelsCannotRunTheCpuBackendIsOffered) {
  for (const auto& [major, minor] :
       {std::pair{7, 5}, {8, 0}, {8, 6}, {8, 9}, {10, 0}, {10, 3}, {11, 0}, {12, 0}, {12, 1}}) {
    const Capability device = capability_of(major, minor);
    EXPECT_FALSE(device.can_run) << device.reason;
    EXPECT_TRUE(says(device, "CPU backend")) << device.reason;
    EXPECT_TRUE(says(device, (std::to_string(major) + "." + std::to_string(minor)).c_str()));
  }
  EXPECT_FALSE(says(capability_of(9, 0), "CPU backend"));
}

}  // namespace
}  // namespace megamoe::device
