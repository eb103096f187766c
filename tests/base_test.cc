// bf16 rounding, tensor views and error codes.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "megamoe/bf16.h"
#include "megamoe/error.h"
#include "megamoe/tensor.h"

namespace megamoe {
namespace {

TEST(Bf16, EveryValueSurvivesTheRoundTrip) {
  for (std::uint32_t bits = 0; bits <= 0xffffU; ++bits) {
    const bf16 value{static_cast<std::uint16_t>(bits)};
    const float wide = to_float(value);
    if (std::isnan(wide)) {
      EXPECT_TRUE(std::isnan(to_float(to_bf16(wide))));
    } else {
      EXPECT_EQ(to_bf16(wide).bits, value.bits);
    }
  }
}

TEST(Bf16, RoundsToNearestTiesToEven) {
  EXPECT_EQ(to_float(to_bf16(1.0F + 0x1p-8F)), 1.0F);                 // tie, even below
  EXPECT_EQ(to_float(to_bf16(1.0F + 0x1p-7F + 0x1p-8F)), 1.015625F);  // tie, even above
  EXPECT_EQ(to_float(to_bf16(-1.0F - 0x1p-8F - 0x1p-20F)), -1.0078125F);
  EXPECT_TRUE(std::isinf(to_float(to_bf16(std::numeric_limits<float>::max()))));
}

TEST(TensorView, ContiguousStridesAndDescription) {
  float data[24] = {};
  const TensorView view = tensor_view(data, {2, 3, 4});
  EXPECT_EQ(view.dtype, DType::fp32);
  EXPECT_EQ(describe(view), "fp32 [2, 3, 4] with strides [12, 4, 1]");
  EXPECT_EQ(describe(ConstTensorView{}), "absent");
}

TEST(TensorView, MoreDimensionsThanItHoldsAreRefused) {
  float data[1] = {};
  EXPECT_THROW(tensor_view(data, {1, 1, 1, 1}), Error);
  ConstTensorView broken = tensor_view(static_cast<const float*>(data), {1, 1, 1});
  broken.num_dims = 9;
  EXPECT_EQ(describe(broken), "fp32 [1, 1, 1] with strides [1, 1, 1]");
}

TEST(TensorView, HalvesOfAFusedWeightAreReadInPlace) {
  bf16 data[2 * 6 * 4] = {};
  const TensorView up = expert_rows(tensor_view(data, {2, 6, 4}), 3, 3);
  EXPECT_EQ(up.data, data + 12);
  EXPECT_EQ(describe(up), "bf16 [2, 3, 4] with strides [24, 4, 1]");
}

TEST(Error, CarriesCodeAndMessage) {
  const Error error(ErrorCode::capacity_exceeded, "needs 12 rows");
  EXPECT_STREQ(error.what(), "needs 12 rows");
  EXPECT_STREQ(to_string(error.code()), "capacity_exceeded");
}

}  // namespace
}  // namespace megamoe
