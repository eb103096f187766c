// How SMs are split between dx and the weight gradients beside it.
#include "schedule/beside_dx.h"

#include <gtest/gtest.h>

namespace megamoe::schedule {
namespace {

TEST(BesideDx, EverySmOfAWholeClusterHasOneOfTheTwo) {
  for (int num_sms = 0; num_sms <= 200; ++num_sms) {
    const SmSplit sms = split_sms(num_sms, kLeastRowsBesideDx);
    if (sms.gradients == 0) {
      EXPECT_EQ(sms.dx, 0) << num_sms;
      continue;
    }
    EXPECT_EQ(sms.gradients % kClusterSize, 0) << num_sms;
    EXPECT_EQ(sms.dx % kClusterSize, 0) << num_sms;
    EXPECT_GT(sms.dx, sms.gradients) << num_sms;
    EXPECT_EQ(sms.gradients + sms.dx, num_sms / kClusterSize * kClusterSize) << num_sms;
  }
}

TEST(BesideDx, AnH200IsSplitAsItWasMeasured) {
  const SmSplit sms = split_sms(132, 1024);
  EXPECT_EQ(sms.gradients, 54);
  EXPECT_EQ(sms.dx, 78);
}

TEST(BesideDx, OneAfterTheOtherWithFewRowsOrSms) {
  EXPECT_EQ(split_sms(132, kLeastRowsBesideDx - 1).gradients, 0);
  EXPECT_EQ(split_sms(4, 1024).gradients, 0);
  EXPECT_EQ(split_sms(6, 1024).gradients, 2);
}

}  // namespace
}  // namespace megamoe::schedule
