#include "routing/router_product.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "base/tensor_check.h"
#include "megamoe/bf16.h"

namespace megamoe::detail {
namespace {

inline float widen(float value) { return value; }
inline float widen(bf16 value) { return to_float(value); }

/// `count` scalars, each with its row of a matrix; strides in elements.
template <class Scalar, class Row>
struct ScaledRows {
  const Scalar* scalars;
  std::int64_t scalar_stride;
  const Row* rows;
  std::int64_t row_stride;
  std::int64_t count;
};

/// Gradients of routing are mostly exact zeros (unselected experts), which may be skipped: adding
/// 0 * finite to a chain that began at +0 changes no bit. Logits are not skipped, so that a NaN in
/// the weight is seen.
enum class ZeroScalar { multiply, skip };

/// sum[i] = the chain over r of fma(scalar_r, row_r[i], sum[i]), from 0. The vector runs along i,
/// where the elements are independent, so its width does not change any bit.
template <ZeroScalar Zero, class Scalar, class Row>
[[gnu::always_inline]] inline void sum_rows_body(const ScaledRows<Scalar, Row>& terms,
                                                 std::int64_t width, float* __restrict sum) {
  std::fill(sum, sum + width, 0.0F);
  for (std::int64_t r = 0; r < terms.count; ++r) {
    const float scalar = widen(terms.scalars[r * terms.scalar_stride]);
    if (Zero == ZeroScalar::skip && scalar == 0.0F) continue;
    const Row* __restrict row = terms.rows + r * terms.row_stride;
    for (std::int64_t i = 0; i < width; ++i) {
      sum[i] = __builtin_fmaf(scalar, widen(row[i]), sum[i]);
    }
  }
}

#if defined(__x86_64__)
/// Without the target, baseline x86-64 calls libm for each fma: equal bits, but many times slower.
template <ZeroScalar Zero, class Scalar, class Row>
__attribute__((target("avx2,fma"))) void sum_rows_fma(const ScaledRows<Scalar, Row>& terms,
                                                      std::int64_t width, float* sum) {
  sum_rows_body<Zero>(terms, width, sum);
}
#endif

template <ZeroScalar Zero, class Scalar, class Row>
void sum_rows(const ScaledRows<Scalar, Row>& terms, std::int64_t width, float* sum) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    sum_rows_fma<Zero>(terms, width, sum);
    return;
  }
#endif
  sum_rows_body<Zero>(terms, width, sum);
}

void write_row(GradWrite write, const float* row, std::int64_t width, float* target) {
  if (write == GradWrite::store) {
    std::copy(row, row + width, target);
    return;
  }
  for (std::int64_t i = 0; i < width; ++i) target[i] += row[i];
}

template <class Weight>
void transpose(const ConstTensorView& router_weight, float* router_weight_HE) {
  const std::int64_t experts = router_weight.sizes[0];
  const std::int64_t hidden = router_weight.sizes[1];
  for (std::int64_t j = 0; j < experts; ++j) {
    const auto* row = row_of<Weight>(router_weight, j);
    for (std::int64_t h = 0; h < hidden; ++h) router_weight_HE[h * experts + j] = widen(row[h]);
  }
}

template <class Weight>
void d_x_rows(const ConstTensorView& d_logits, const ConstTensorView& router_weight,
              GradWrite write, float* row_H, const TensorView& d_x) {
  const std::int64_t hidden = router_weight.sizes[1];
  for (std::int64_t t = 0; t < d_logits.sizes[0]; ++t) {
    const ScaledRows<float, Weight> terms{row_of<float>(d_logits, t), 1,
                                          static_cast<const Weight*>(router_weight.data),
                                          router_weight.strides[0], router_weight.sizes[0]};
    sum_rows<ZeroScalar::skip>(terms, hidden, row_H);
    write_row(write, row_H, hidden, row_of<float>(d_x, t));
  }
}

}  // namespace

void transpose_router_weight(const ConstTensorView& router_weight, float* router_weight_HE) {
  if (router_weight.dtype == DType::bf16) {
    transpose<bf16>(router_weight, router_weight_HE);
  } else {
    transpose<float>(router_weight, router_weight_HE);
  }
}

void logits_product(const ConstTensorView& x, const float* router_weight_HE,
                    std::int64_t num_experts, float* logits_TE) {
  for (std::int64_t t = 0; t < x.sizes[0]; ++t) {
    const ScaledRows<bf16, float> terms{row_of<bf16>(x, t), 1, router_weight_HE, num_experts,
                                        x.sizes[1]};
    sum_rows<ZeroScalar::multiply>(terms, num_experts, logits_TE + t * num_experts);
  }
}

void d_x_product(const ConstTensorView& d_logits, const ConstTensorView& router_weight,
                 GradWrite write, float* row_H, const TensorView& d_x) {
  if (router_weight.dtype == DType::bf16) {
    d_x_rows<bf16>(d_logits, router_weight, write, row_H, d_x);
  } else {
    d_x_rows<float>(d_logits, router_weight, write, row_H, d_x);
  }
}

void d_router_weight_product(const ConstTensorView& d_logits, const ConstTensorView& x,
                             GradWrite write, float* row_H, const TensorView& d_router_weight) {
  const std::int64_t hidden = x.sizes[1];
  for (std::int64_t j = 0; j < d_logits.sizes[1]; ++j) {
    const ScaledRows<float, bf16> terms{static_cast<const float*>(d_logits.data) + j,
                                        d_logits.strides[0], static_cast<const bf16*>(x.data),
                                        x.strides[0], x.sizes[0]};
    sum_rows<ZeroScalar::skip>(terms, hidden, row_H);
    write_row(write, row_H, hidden, row_of<float>(d_router_weight, j));
  }
}

}  // namespace megamoe::detail
