// Runs a test once on each instruction set that is both compiled in and supported by this machine;
// SCALAR is always among them.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <string>

#include "cpu/fma_peak.h"
#include "cpu/simd_targets.h"
// After simd_targets.h.
#include "hwy/targets.h"

namespace megamoe::cpu {

class SimdTargetTest : public testing::TestWithParam<std::int64_t> {
 protected:
  void SetUp() override {
    hwy::SetSupportedTargetsForTest(GetParam());
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    ASSERT_STREQ(simd_target_name(), hwy::TargetName(GetParam()));
  }
  void TearDown() override {
    hwy::SetSupportedTargetsForTest(0);
    hwy::GetChosenTarget().DeInit();
  }
};

inline auto every_simd_target() { return testing::ValuesIn(hwy::SupportedAndGeneratedTargets()); }

inline std::string simd_target_test_name(const testing::TestParamInfo<std::int64_t>& target) {
  return hwy::TargetName(target.param);
}

}  // namespace megamoe::cpu
