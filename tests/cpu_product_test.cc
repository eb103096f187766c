// The CPU product, bit for bit against a chain of std::fma, on every instruction set of this
// machine.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cpu/fma_peak.h"
#include "cpu/product.h"
#include "megamoe/bf16.h"
#include "sanitized.h"
#include "simd_target_fixture.h"

namespace megamoe::cpu {
namespace {

struct Sizes {
  std::int64_t m, n, k;
};

enum class Layout { k_contiguous, rows_contiguous, neither };

/// An operand with its own memory. Elements between its rows are NaN: reading one shows.
class Matrix {
 public:
  Matrix(std::int64_t rows, std::int64_t k, Layout layout, std::int64_t gap, std::mt19937& random) {
    std::int64_t row_stride = k + gap;
    std::int64_t col_stride = 1;
    if (layout == Layout::rows_contiguous) {
      row_stride = 1;
      col_stride = rows + gap;
    } else if (layout == Layout::neither) {
      row_stride = 2 * (k + gap);
      col_stride = 2;
    }
    const std::int64_t count =
        rows == 0 || k == 0 ? 0 : (rows - 1) * row_stride + (k - 1) * col_stride + 1;
    values_.assign(static_cast<std::size_t>(count),
                   to_bf16(std::numeric_limits<float>::quiet_NaN()));
    operand_ = {values_.data(), row_stride, col_stride};
    std::normal_distribution<float> normal;
    for (std::int64_t row = 0; row < rows; ++row) {
      for (std::int64_t col = 0; col < k; ++col) at(row, col) = to_bf16(normal(random));
    }
  }
  bf16& at(std::int64_t row, std::int64_t col) {
    return values_[static_cast<std::size_t>(row * operand_.row_stride + col * operand_.col_stride)];
  }
  [[nodiscard]] Operand operand() const { return operand_; }

 private:
  std::vector<bf16> values_;
  Operand operand_{};
};

/// The meaning of product(), as directly as it can be written.
void reference_product(const Sizes& sizes, Operand a, Operand b, float* c, std::int64_t c_stride,
                       ChainStart start) {
  for (std::int64_t i = 0; i < sizes.m; ++i) {
    for (std::int64_t j = 0; j < sizes.n; ++j) {
      float sum = start == ChainStart::zero ? 0.0F : c[i * c_stride + j];
      for (std::int64_t k = 0; k < sizes.k; ++k) {
        sum = std::fma(to_float(*a.from(i, k).data), to_float(*b.from(j, k).data), sum);
      }
      c[i * c_stride + j] = sum;
    }
  }
}

/// Equal bits, but any NaN equals any NaN.
bool same_bits(float x, float y) {
  return std::bit_cast<std::uint32_t>(x) == std::bit_cast<std::uint32_t>(y) ||
         (std::isnan(x) && std::isnan(y));
}

testing::AssertionResult same_bits(const std::vector<float>& x, const std::vector<float>& y) {
  if (x.size() != y.size()) return testing::AssertionFailure() << "sizes differ";
  for (std::size_t i = 0; i < x.size(); ++i) {
    if (!same_bits(x[i], y[i])) {
      return testing::AssertionFailure() << "element " << i << ": " << x[i] << " and " << y[i];
    }
  }
  return testing::AssertionSuccess();
}

/// Random contents with a margin before and after, so that a write outside c shows as a difference.
constexpr std::int64_t kMargin = 64;
std::vector<float> make_c(std::int64_t m, std::int64_t c_stride, std::mt19937& random) {
  std::vector<float> c(static_cast<std::size_t>(m * c_stride + 2 * kMargin));
  std::normal_distribution<float> normal;
  for (float& value : c) value = normal(random);
  return c;
}

class ProductTest : public SimdTargetTest {
 protected:
  void check(const Sizes& sizes, Layout a_layout, Layout b_layout, std::int64_t gap,
             ChainStart start) {
    const Matrix a(sizes.m, sizes.k, a_layout, gap, random_);
    const Matrix b(sizes.n, sizes.k, b_layout, gap, random_);
    const std::int64_t c_stride = sizes.n + gap;
    std::vector<float> expected = make_c(sizes.m, c_stride, random_);
    std::vector<float> actual = expected;
    reference_product(sizes, a.operand(), b.operand(), expected.data() + kMargin, c_stride, start);
    product(sizes.m, sizes.n, sizes.k, a.operand(), b.operand(), actual.data() + kMargin, c_stride,
            start, scratch_);
    EXPECT_TRUE(same_bits(expected, actual))
        << "m " << sizes.m << " n " << sizes.n << " k " << sizes.k << " layouts "
        << static_cast<int>(a_layout) << static_cast<int>(b_layout) << " gap " << gap << " start "
        << static_cast<int>(start);
  }

  std::mt19937 random_{20};
  ProductScratch scratch_;
};

INSTANTIATE_TEST_SUITE_P(Targets, ProductTest, every_simd_target(), simd_target_test_name);

TEST_P(ProductTest, EveryLayoutAndSmallSize) {
  for (const Layout a_layout : {Layout::k_contiguous, Layout::rows_contiguous, Layout::neither}) {
    for (const Layout b_layout : {Layout::k_contiguous, Layout::rows_contiguous, Layout::neither}) {
      for (const std::int64_t m : {0, 1, 3, 13}) {
        for (const std::int64_t n : {0, 1, 5, 33}) {
          for (const std::int64_t k : {0, 1, 7, 19}) {
            check({m, n, k}, a_layout, b_layout, 0, ChainStart::zero);
            check({m, n, k}, a_layout, b_layout, 5, ChainStart::output);
          }
        }
      }
    }
  }
}

TEST_P(ProductTest, EveryTileHeightAndWidth) {
  for (std::int64_t m = 1; m <= 30; ++m) {
    check({m, 70, 21}, Layout::k_contiguous, Layout::k_contiguous, 1, ChainStart::zero);
  }
  for (std::int64_t n = 1; n <= 70; ++n) {
    check({14, n, 21}, Layout::rows_contiguous, Layout::k_contiguous, 1, ChainStart::output);
  }
}

TEST_P(ProductTest, RandomSizesUpToSeveralBlocks) {
  std::uniform_int_distribution<std::int64_t> small(1, 90);
  std::uniform_int_distribution<std::int64_t> large_k(200, 700);
  std::uniform_int_distribution<int> layout(0, 2);
  std::uniform_int_distribution<std::int64_t> gap(0, 9);
  for (int trial = 0; trial < less_if_sanitized(30, 6); ++trial) {
    const Sizes sizes{small(random_), small(random_), large_k(random_)};
    check(sizes, static_cast<Layout>(layout(random_)), static_cast<Layout>(layout(random_)),
          gap(random_), trial % 2 == 0 ? ChainStart::zero : ChainStart::output);
  }
}

TEST_P(ProductTest, MoreRowsThanABlock) {
  constexpr std::int64_t kColumns = less_if_sanitized(35, 5);
  check({1001, kColumns, 300}, Layout::k_contiguous, Layout::k_contiguous, 3, ChainStart::zero);
  check({961, kColumns, 300}, Layout::rows_contiguous, Layout::rows_contiguous, 0,
        ChainStart::output);
}

TEST_P(ProductTest, ARowDoesNotDependOnItsNeighbours) {
  const Sizes sizes{29, 41, 530};
  const Matrix a(sizes.m, sizes.k, Layout::k_contiguous, 0, random_);
  const Matrix b(sizes.n, sizes.k, Layout::rows_contiguous, 0, random_);
  std::vector<float> together(static_cast<std::size_t>(sizes.m * sizes.n));
  std::vector<float> one_by_one(together.size());
  std::vector<float> by_element(together.size());
  product(sizes.m, sizes.n, sizes.k, a.operand(), b.operand(), together.data(), sizes.n,
          ChainStart::zero, scratch_);
  for (std::int64_t i = 0; i < sizes.m; ++i) {
    product(1, sizes.n, sizes.k, a.operand().from(i, 0), b.operand(),
            one_by_one.data() + i * sizes.n, sizes.n, ChainStart::zero, scratch_);
    for (std::int64_t j = 0; j < sizes.n; ++j) {
      product(1, 1, sizes.k, a.operand().from(i, 0), b.operand().from(j, 0),
              by_element.data() + i * sizes.n + j, sizes.n, ChainStart::zero, scratch_);
    }
  }
  EXPECT_TRUE(same_bits(together, one_by_one));
  EXPECT_TRUE(same_bits(together, by_element));
}

TEST_P(ProductTest, AChainCutInTwoGivesTheSameBits) {
  const Sizes sizes{23, 37, 611};
  const Matrix a(sizes.m, sizes.k, Layout::k_contiguous, 0, random_);
  const Matrix b(sizes.n, sizes.k, Layout::k_contiguous, 0, random_);
  std::vector<float> whole(static_cast<std::size_t>(sizes.m * sizes.n));
  product(sizes.m, sizes.n, sizes.k, a.operand(), b.operand(), whole.data(), sizes.n,
          ChainStart::zero, scratch_);
  for (const std::int64_t cut : {1, 100, 256, 610}) {
    std::vector<float> parts(whole.size());
    product(sizes.m, sizes.n, cut, a.operand(), b.operand(), parts.data(), sizes.n,
            ChainStart::zero, scratch_);
    product(sizes.m, sizes.n, sizes.k - cut, a.operand().from(0, cut), b.operand().from(0, cut),
            parts.data(), sizes.n, ChainStart::output, scratch_);
    EXPECT_TRUE(same_bits(whole, parts)) << "cut at " << cut;
  }
}

TEST_P(ProductTest, NanInfinityAndSubnormalsStayInTheirRowAndColumn) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const Sizes sizes{27, 45, 300};
  Matrix a(sizes.m, sizes.k, Layout::k_contiguous, 0, random_);
  Matrix b(sizes.n, sizes.k, Layout::k_contiguous, 0, random_);
  a.at(3, 5) = to_bf16(std::numeric_limits<float>::quiet_NaN());
  a.at(26, 299) = to_bf16(kInfinity);
  b.at(44, 256) = to_bf16(-kInfinity);
  b.at(7, 0) = to_bf16(std::numeric_limits<float>::quiet_NaN());
  b.at(9, 299) = to_bf16(0.0F);  // times infinity
  for (std::int64_t k = 0; k < sizes.k; ++k) {
    a.at(11, k) = bf16{static_cast<std::uint16_t>(1 + k % 100)};  // subnormal
    b.at(12, k) = to_bf16(-0.0F);
  }
  std::vector<float> expected(static_cast<std::size_t>(sizes.m * sizes.n));
  std::vector<float> actual(expected.size());
  reference_product(sizes, a.operand(), b.operand(), expected.data(), sizes.n, ChainStart::zero);
  product(sizes.m, sizes.n, sizes.k, a.operand(), b.operand(), actual.data(), sizes.n,
          ChainStart::zero, scratch_);
  EXPECT_TRUE(same_bits(expected, actual));
  const auto at = [&](std::int64_t i, std::int64_t j) {
    return actual[static_cast<std::size_t>(i * sizes.n + j)];
  };
  EXPECT_TRUE(std::isnan(at(3, 0)));
  EXPECT_TRUE(std::isnan(at(0, 7)));
  EXPECT_TRUE(std::isnan(at(26, 9)));
  EXPECT_TRUE(std::isinf(at(0, 44)));
  EXPECT_TRUE(std::isfinite(at(0, 0)));
}

TEST_P(ProductTest, RoundsOnceWhereAProductAloneWouldOverflowOrUnderflow) {
  // Elsewhere the product of two bf16 is exact in fp32 and a separate addition gives equal bits.
  const bf16 a[2] = {to_bf16(0x1p64F), to_bf16(0x1p-75F)};
  const bf16 b[2] = {to_bf16(0x1p64F), to_bf16(0x1p-75F)};
  float overflow = -0x1p127F;
  product(1, 1, 1, {a, 1, 1}, {b, 1, 1}, &overflow, 1, ChainStart::output, scratch_);
  EXPECT_EQ(overflow, 0x1p127F);
  float underflow = 0x1p-149F;
  product(1, 1, 1, {a + 1, 1, 1}, {b + 1, 1, 1}, &underflow, 1, ChainStart::output, scratch_);
  EXPECT_EQ(underflow, 0x1p-148F);
}

TEST_P(ProductTest, EmptyProductsTouchOnlyWhatTheyMust) {
  const Operand nothing{nullptr, 1, 1};
  product(0, 5, 5, nothing, nothing, nullptr, 5, ChainStart::zero, scratch_);
  product(5, 0, 5, nothing, nothing, nullptr, 5, ChainStart::zero, scratch_);
  std::vector<float> c(8, 3.0F);
  product(2, 3, 0, nothing, nothing, c.data(), 4, ChainStart::output, scratch_);
  EXPECT_EQ(c, std::vector<float>(8, 3.0F));
  product(2, 3, 0, nothing, nothing, c.data(), 4, ChainStart::zero, scratch_);
  EXPECT_EQ(c, (std::vector<float>{0, 0, 0, 3, 0, 0, 0, 3}));
}

TEST(ProductScratch, GrowsOnlyWhenItMust) {
  ProductScratch scratch;
  const float* large = scratch.reserve(1000);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(large) % 64, 0U);
  EXPECT_EQ(scratch.reserve(10), large);
  EXPECT_EQ(scratch.reserve(1000), large);
}

TEST(FmaPeak, IsAPlausibleRate) {
  const double gflops = measure_fma_peak_gflops();
  EXPECT_GT(gflops, 0.001);
  EXPECT_LT(gflops, 10'000.0);
}

}  // namespace
}  // namespace megamoe::cpu
