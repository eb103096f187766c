// bf16 in memory to fp32 in lanes. Included once a target.
#if defined(MEGAMOE_CPU_WIDEN_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef MEGAMOE_CPU_WIDEN_INL_H
#undef MEGAMOE_CPU_WIDEN_INL_H
#else
#define MEGAMOE_CPU_WIDEN_INL_H
#endif

#include <cstdint>

#include "hwy/highway.h"
#include "megamoe/bf16.h"

HWY_BEFORE_NAMESPACE();
namespace megamoe::cpu::HWY_NAMESPACE {

/// As many elements as D has lanes.
template <class D>
HWY_INLINE hwy::HWY_NAMESPACE::Vec<D> widen_lanes(D d, const bf16* source) {
  namespace hn = hwy::HWY_NAMESPACE;
  const hn::RebindToUnsigned<D> d_u32;
  const hn::Rebind<std::uint16_t, D> d_u16;
  const auto bits = hn::LoadU(d_u16, &source->bits);
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(d_u32, bits)));
}

}  // namespace megamoe::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target guard
