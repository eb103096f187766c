#include "cpu/row_ops.h"

#include <cmath>

#include "cpu/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/row_ops.cc"
#include "hwy/foreach_target.h"
// Highway's order: foreach_target.h before anything that includes highway.h.
#include "cpu/fma-inl.h"
#include "cpu/widen-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace megamoe::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// to_bf16() of every lane, in integers as there.
template <class D>
HWY_INLINE void store_rounded(D /*d*/, hn::Vec<D> values, bf16* out) {
  const hn::RebindToUnsigned<D> d_u32;
  const hn::Rebind<std::uint16_t, D> d_u16;
  const auto bits = hn::BitCast(d_u32, values);
  const auto upper = hn::ShiftRight<16>(bits);
  const auto is_odd = hn::And(upper, hn::Set(d_u32, 1U));
  const auto bias = hn::Add(is_odd, hn::Set(d_u32, 0x7fffU));
  const auto rounded = hn::ShiftRight<16>(hn::Add(bits, bias));
  const auto quiet_nan = hn::Or(upper, hn::Set(d_u32, 0x0040U));
  const auto is_nan = hn::RebindMask(d_u32, hn::IsNaN(values));
  const auto result = hn::IfThenElse(is_nan, quiet_nan, rounded);
  // Below 2^16: the saturation of this conversion changes nothing.
  const auto narrow = hn::DemoteTo(d_u16, hn::BitCast(hn::RebindToSigned<D>(), result));
  hn::StoreU(narrow, d_u16, &out->bits);
}

void add_weighted(float weight, const bf16* HWY_RESTRICT row, std::int64_t count,
                  float* HWY_RESTRICT sums) {
  const hn::ScalableTag<float> d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const auto factor = hn::Set(d, weight);
  std::int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const auto sum = fused_multiply_add(factor, widen_lanes(d, row + i), hn::LoadU(d, sums + i));
    hn::StoreU(sum, d, sums + i);
  }
  for (; i < count; ++i) sums[i] = std::fma(weight, to_float(row[i]), sums[i]);
}

void round_values(const float* HWY_RESTRICT values, std::int64_t count, bf16* HWY_RESTRICT out) {
  const hn::ScalableTag<float> d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  std::int64_t i = 0;
  for (; i + lanes <= count; i += lanes) store_rounded(d, hn::LoadU(d, values + i), out + i);
  for (; i < count; ++i) out[i] = to_bf16(values[i]);
}

}  // namespace megamoe::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace megamoe::cpu {

HWY_EXPORT(add_weighted);
HWY_EXPORT(round_values);

void add_weighted_row(float weight, const bf16* row, std::int64_t count, float* sums) {
  HWY_DYNAMIC_DISPATCH(add_weighted)(weight, row, count, sums);
}

void round_row(const float* values, std::int64_t count, bf16* out) {
  HWY_DYNAMIC_DISPATCH(round_values)(values, count, out);
}

}  // namespace megamoe::cpu
#endif  // HWY_ONCE
