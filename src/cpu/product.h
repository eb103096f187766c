// The matrix product of the CPU backend: bf16 operands, fp32 accumulation in one fixed order.
//
// Three files: product.cc cuts the product into cache-sized blocks, pack-inl.h turns a block of an
// operand into fp32 panels, micro_kernel-inl.h multiplies two panels in registers.
#pragma once

#include <cstdint>
#include <memory>

#include "megamoe/bf16.h"

namespace megamoe::cpu {

/// Element (r, c) of a bf16 operand is data[r * row_stride + c * col_stride]. One of the strides
/// is usually 1 and that case is fast; any strides are right.
struct Operand {
  const bf16* data;
  std::int64_t row_stride;
  std::int64_t col_stride;

  /// The operand whose element (0, 0) is this one's element (row, col).
  [[nodiscard]] Operand from(std::int64_t row, std::int64_t col) const {
    return {data + row * row_stride + col * col_stride, row_stride, col_stride};
  }
};

/// What each element's chain of additions starts from.
enum class ChainStart {
  zero,    ///< c is written only
  output,  ///< the chain continues from what c holds (dx: all of dg, then all of du)
};

/// Memory for packed panels, at most about 600 KB. Keep one for each thread and pass it to every
/// product: it allocates only when a product needs more than any before it.
class ProductScratch {
 public:
  /// At least num_floats floats, aligned to a cache line, with undefined contents; valid until the
  /// next call. Throws Error(out_of_memory).
  float* reserve(std::int64_t num_floats);

 private:
  struct Free {
    void operator()(float* data) const;
  };
  std::unique_ptr<float[], Free> data_;
  std::int64_t capacity_ = 0;
};

/// Floats that no product needs more of: with them reserved, none allocates.
std::int64_t max_scratch_floats();

/// c(i, j) = the chain fma(a(i, k), b(j, k), ...) over k = 0 .. num_k - 1 in increasing order, in
/// fp32, for i < m and j < n; a is m x num_k, b is n x num_k, c is row-major with c_stride >= n
/// and overlaps neither. Any size may be 0; num_k = 0 writes zeros (or leaves c, for
/// ChainStart::output).
///
/// The bits of an element depend only on its own row of a and of b: not on m, n, strides, blocking,
/// the processor's vectors, or the neighbouring rows. A NaN's payload is not part of that promise.
void product(std::int64_t m, std::int64_t n, std::int64_t num_k, Operand a, Operand b, float* c,
             std::int64_t c_stride, ChainStart start, ProductScratch& scratch);

}  // namespace megamoe::cpu
