// What `megamoe info` says about devices, with mocked compute capabilities.
#include "device/capability.h"

#include <gtest/gtest.h>

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

}  // namespace
}  // namespace megamoe::device
