// The comparator finds what has fooled others: negative mismatches, NaN, swapped experts, the wrong
// order of rows, one wrong expert among many, missing tensors.
#include "verify/compare.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "verify/oracle.h"
#include "verify/problem.h"

namespace megamoe::verify {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// Eight experts of 16 x 16 normal numbers, and their bf16 roundings as the baseline.
class CompareTest : public testing::Test {
 protected:
  CompareTest() {
    reference_.shape = {8, 16, 16};
    for (std::uint64_t i = 0; i < 8 * 16 * 16; ++i) reference_.values.push_back(normal_at(1, 9, i));
    baseline_ = reference_;
    for (double& value : baseline_.values) value = round_to_bf16(value);
    actual_ = baseline_;
  }

  Comparison run() const {
    return compare("dgate", actual_, reference_, baseline_, {.slice_name = "expert"});
  }
  void expect_failure(const std::string& text) const {
    const Comparison result = run();
    EXPECT_FALSE(result.passed);
    EXPECT_NE(result.failure.find(text), std::string::npos) << result.failure;
  }
  double* expert(std::int64_t index) { return &actual_.values[index * 256]; }

  HostTensor reference_;
  HostTensor baseline_;
  HostTensor actual_;
};

TEST_F(CompareTest, PassesTheBaselineItself) {
  const Comparison result = run();
  EXPECT_TRUE(result.passed) << result.failure;
  EXPECT_GT(result.error, 1e-3);
  EXPECT_NEAR(result.allowed, 2 * result.error, 1e-12);
  EXPECT_NE(result.worst_slice.find("expert"), std::string::npos);
}

TEST_F(CompareTest, PassesAnotherRoundingOfTheSamePrecision) {
  for (std::size_t i = 0; i < actual_.values.size(); ++i) {  // towards zero: up to twice the error
    actual_.values[i] = round_to_bf16(reference_.values[i] * (1.0 - 0x1p-10));
  }
  EXPECT_TRUE(run().passed) << run().failure;
}

TEST_F(CompareTest, FindsThreeRoundingsTooMany) {
  for (double& value : actual_.values) value *= 1.0 + 0x1p-7;
  expect_failure("the whole tensor");
}

TEST_F(CompareTest, FindsNegativeMismatches) {
  for (double& value : actual_.values) value -= 1.0;
  expect_failure("the whole tensor");
}

TEST_F(CompareTest, FindsAFlippedSign) {
  *std::max_element(expert(2), expert(3)) *= -1.0;
  expect_failure("expert 2");
}

TEST_F(CompareTest, FindsOneWrongElementOfOneExpert) {
  expert(5)[100] += 0.5;
  expect_failure("expert 5");
}

TEST_F(CompareTest, FindsAZeroedExpert) {
  std::fill(expert(7), expert(7) + 256, 0.0);
  expect_failure("expert 7");
}

TEST_F(CompareTest, FindsSwappedExperts) {
  std::swap_ranges(expert(1), expert(2), expert(4));
  expect_failure("expert");
}

TEST_F(CompareTest, FindsRowsInTheWrongOrder) {
  std::swap_ranges(expert(3), expert(3) + 16, expert(3) + 16);
  expect_failure("expert 3");
}

TEST_F(CompareTest, FindsATransposedExpert) {
  for (int row = 0; row < 16; ++row) {
    for (int column = 0; column < row; ++column) {
      std::swap(expert(0)[row * 16 + column], expert(0)[column * 16 + row]);
    }
  }
  expect_failure("expert 0");
}

TEST_F(CompareTest, NothingThatIsNotFinitePasses) {
  for (const double value : {kNan, kInfinity, -kInfinity}) {
    actual_ = baseline_;
    expert(3)[17] = value;
    expect_failure("element [3, 1, 1]");
  }
  std::fill(actual_.values.begin(), actual_.values.end(), kNan);
  EXPECT_FALSE(run().passed);
  actual_ = baseline_;
  reference_.values[0] = kNan;  // an oracle that broke down proves nothing
  expect_failure("oracle");
}

TEST_F(CompareTest, MissingAndMisshapenTensorsFail) {
  actual_.shape = {8, 256};
  expect_failure("shape [8, 256]");
  actual_.shape = {8, 16, 16};
  actual_.values.pop_back();
  expect_failure("2047 elements");
  actual_ = {};
  expect_failure("missing");
}

TEST_F(CompareTest, AnEmptyExpertMustBeExactlyZero) {
  std::fill_n(&reference_.values[2 * 256], 256, 0.0);
  std::fill_n(&baseline_.values[2 * 256], 256, 0.0);
  std::fill_n(expert(2), 256, 0.0);
  EXPECT_TRUE(run().passed);
  std::fill_n(expert(2), 256, -0.0);
  EXPECT_TRUE(run().passed);
  expert(2)[9] = -1e-30;
  expect_failure("expert 2");
}

TEST_F(CompareTest, ATensorOfZeroElementsPasses) {
  const HostTensor empty{{0, 16}, {}};
  EXPECT_TRUE(compare("y", empty, empty, empty, {}).passed);
}

TEST(Compare, OneElementMayTakeTheNeighbouringBf16Number) {
  // 1 + 2^-8 lies between two bf16 numbers; a sum that is off by one fp32 bit decides for either,
  // and after it nothing averages over roundings.
  const HostTensor reference{{1, 1}, {1.0 + 0x1p-8 - 0x1p-20}};
  const HostTensor baseline{{1, 1}, {1.0}};
  EXPECT_TRUE(compare("y", {{1, 1}, {1.0}}, reference, baseline, {}).passed);
  EXPECT_TRUE(compare("y", {{1, 1}, {1.0 + 0x1p-7}}, reference, baseline, {}).passed);
  EXPECT_FALSE(compare("y", {{1, 1}, {1.0 + 0x1p-6}}, reference, baseline, {}).passed);

  const HostTensor exact{{1, 1}, {1.5}};  // a baseline whose error is 0 by chance
  EXPECT_TRUE(compare("y", {{1, 1}, {1.5 + 0x1p-7}}, exact, exact, {}).passed);
  EXPECT_FALSE(compare("y", {{1, 1}, {1.5 + 0x1p-6}}, exact, exact, {}).passed);
}

TEST(Compare, TheFloorVanishesForTensorsOfManyElements) {
  HostTensor reference{{1, 4096}, {}};
  for (std::uint64_t i = 0; i < 4096; ++i) reference.values.push_back(normal_at(3, 1, i));
  EXPECT_LT(compare("y", reference, reference, reference, {}).allowed, 5e-4);
}

TEST(Compare, FloorsCanBeGiven) {
  // An exact baseline, as for a tensor that no bf16 rounding precedes.
  const HostTensor reference{{2, 1}, {1.0, 8.0}};
  CompareOptions options{.slice_floors = {0.0, 0.0}};
  EXPECT_TRUE(
      compare("weights", {{2, 1}, {1.0 + 0x1p-23, 8.0}}, reference, reference, options).passed);
  EXPECT_FALSE(
      compare("weights", {{2, 1}, {1.0 + 0x1p-7, 8.0}}, reference, reference, options).passed);
  options.slice_floors = {0.0, 0.25};
  EXPECT_TRUE(compare("weights", {{2, 1}, {1.0, 8.25}}, reference, reference, options).passed);
  EXPECT_FALSE(compare("weights", {{2, 1}, {1.25, 8.0}}, reference, reference, options).passed);
  options.slice_floors = {0.25};
  EXPECT_FALSE(compare("weights", reference, reference, reference, options).passed);
}

TEST(Compare, RoundingsBehindASliceAllowTwoStepsOfOneAndTwiceTheirSum) {
  const HostTensor reference{{2, 8}, std::vector<double>(16, 1.0)};
  CompareOptions options;
  const auto passes = [&](double error) {  // all of it in one element of the first slice
    HostTensor actual = reference;
    actual.values[0] += error;
    return compare("y", actual, reference, reference, options).passed;
  };
  options.slice_effects = {{0.01, 0.1}, {0.01, 0.1}};  // one rounding behind each
  EXPECT_TRUE(passes(0.399));
  EXPECT_FALSE(passes(0.401));
  options.slice_effects = {{3.0, 0.1}, {3.0, 0.1}};  // 300 roundings, off by 1 together
  EXPECT_TRUE(passes(1.99));
  EXPECT_FALSE(passes(2.01));
  options.slice_effects = {{0.01, 0.1}};
  EXPECT_FALSE(passes(0.0));
}

TEST(Compare, AnExactZeroBehindWhichSomethingIsRoundedMayDiffer) {
  const HostTensor reference{{2, 1}, {0.0, 0.0}};
  CompareOptions options{.slice_effects = {{0.01, 0.1}, {}}};
  EXPECT_TRUE(compare("dup", {{2, 1}, {0.3, 0.0}}, reference, reference, options).passed);
  EXPECT_FALSE(compare("dup", {{2, 1}, {0.0, 1e-9}}, reference, reference, options).passed);
}

TEST(Compare, LongerSumsMayErrMore) {
  const HostTensor reference{{1, 2}, {1.0, 0x1p-30}};
  const auto allowed = [&](std::int64_t length) {
    return compare("y", reference, reference, reference, {.reduction_length = length}).allowed;
  };
  EXPECT_EQ(allowed(16), 0x1p-7);  // the bf16 step decides
  EXPECT_EQ(allowed(16 << 20), 4 * 0x1p-4);
}

TEST(Compare, SlotsAreJudgedAgainstTheLengthsOfTheirVectors) {
  // The inner product of two vectors of length 100 cancels to 0.01; an error of 0.1 is right.
  const HostTensor reference{{1, 2}, {0.01, 40.0}};
  const HostTensor baseline{{1, 2}, {0.21, 40.3}};
  CompareOptions options{.slice_name = "slot", .slice_dims = 2, .slice_norms = {100.0, 100.0}};
  EXPECT_TRUE(compare("dweights", {{1, 2}, {0.11, 39.9}}, reference, baseline, options).passed);
  const Comparison wrong =
      compare("dweights", {{1, 2}, {40.0, 0.01}}, reference, baseline, options);
  EXPECT_FALSE(wrong.passed);
  EXPECT_NE(wrong.failure.find("slot [0, "), std::string::npos) << wrong.failure;
  options.slice_norms = {0.0, 100.0};  // an empty slot: exactly 0
  const HostTensor with_hole{{1, 2}, {0.0, 40.0}};
  EXPECT_FALSE(compare("dweights", {{1, 2}, {1e-20, 40.0}}, with_hole, with_hole, options).passed);
  options.slice_norms = {1.0};
  EXPECT_FALSE(compare("dweights", reference, reference, reference, options).passed);
}

}  // namespace
}  // namespace megamoe::verify
