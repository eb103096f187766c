// The fused multiply-add of the target being compiled. Included once a target (see Highway's
// foreach_target.h), hence the unusual guard.
#if defined(MEGAMOE_CPU_FMA_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef MEGAMOE_CPU_FMA_INL_H
#undef MEGAMOE_CPU_FMA_INL_H
#else
#define MEGAMOE_CPU_FMA_INL_H
#endif

#include <cmath>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace megamoe::cpu::HWY_NAMESPACE {

/// a * b + sum in every lane, rounded once.
template <class V>
HWY_INLINE V fused_multiply_add(V a, V b, V sum) {
#if HWY_NATIVE_FMA
  return hwy::HWY_NAMESPACE::MulAdd(a, b, sum);
#elif HWY_TARGET == HWY_SCALAR
  return V(std::fma(a.raw, b.raw, sum.raw));
#else
#error "This target has no fused multiply-add: disable it in simd_targets.h"
#endif
}

}  // namespace megamoe::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target guard
