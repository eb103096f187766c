// Elementwise work on rows, bit for bit against plain loops, on every instruction set of this
// machine.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "cpu/row_ops.h"
#include "simd_target_fixture.h"

namespace megamoe::cpu {
namespace {

class RowOpsTest : public SimdTargetTest {};

INSTANTIATE_TEST_SUITE_P(Targets, RowOpsTest, every_simd_target(), simd_target_test_name);

/// Every upper half of a float, with the lower halves on which rounding turns.
std::vector<float> floats_around_roundings() {
  std::vector<float> values;
  for (std::uint32_t upper = 0; upper < 0x10000U; ++upper) {
    for (const std::uint32_t lower : {0x0000U, 0x0001U, 0x7fffU, 0x8000U, 0x8001U, 0xffffU}) {
      values.push_back(std::bit_cast<float>(upper << 16 | lower));
    }
  }
  return values;
}

TEST_P(RowOpsTest, RoundsEveryKindOfNumberAsTheScalarFunction) {
  const std::vector<float> values = floats_around_roundings();
  std::vector<bf16> rounded(values.size());
  round_row(values.data(), static_cast<std::int64_t>(values.size()), rounded.data());
  for (std::size_t i = 0; i < values.size(); ++i) {
    ASSERT_EQ(rounded[i].bits, to_bf16(values[i]).bits)
        << std::hex << std::bit_cast<std::uint32_t>(values[i]);
  }
}

TEST_P(RowOpsTest, AnyLengthAndNothingBeyondIt) {
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  constexpr std::int64_t kMost = 70;
  for (std::int64_t count = 0; count <= kMost; ++count) {
    std::vector<bf16> row(count);
    std::vector<float> sums(kMost + 1);
    std::vector<float> expected(kMost + 1);
    for (bf16& value : row) value = to_bf16(normal(random));
    for (float& value : sums) value = normal(random);
    expected = sums;
    for (std::int64_t i = 0; i < count; ++i) {
      expected[i] = std::fma(1.0F / 3, to_float(row[i]), expected[i]);
    }
    add_weighted_row(1.0F / 3, row.data(), count, sums.data());
    EXPECT_EQ(sums, expected) << count;

    std::vector<bf16> rounded(kMost + 1, bf16{0xabcd});
    round_row(sums.data(), count, rounded.data());
    for (std::int64_t i = 0; i <= kMost; ++i) {
      EXPECT_EQ(rounded[i].bits, i < count ? to_bf16(sums[i]).bits : 0xabcd) << count;
    }
  }
}

TEST_P(RowOpsTest, AWeightedSumIsRoundedOnce) {
  // (1 + 2^-23) (1 + 2^-7) has 31 bits: a product that is rounded on its own loses the 2^-30.
  const float weight = 1.0F + 0x1p-23F;
  const std::vector<bf16> row(40, to_bf16(1.0F + 0x1p-7F));
  std::vector<float> sums(row.size(), -(1.0F + 0x1p-7F));
  add_weighted_row(weight, row.data(), static_cast<std::int64_t>(row.size()), sums.data());
  for (const float sum : sums) EXPECT_EQ(sum, 0x1p-23F + 0x1p-30F);
}

}  // namespace
}  // namespace megamoe::cpu
