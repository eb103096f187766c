#include "bench/dense_product.h"

namespace megamoe::bench {

DenseProduct::DenseProduct(cudaStream_t stream)
    : cublas_(tools::why_no_cublas().empty() ? std::make_unique<tools::Cublas>(stream) : nullptr) {}

void DenseProduct::multiply(std::int64_t size, const void* a, const void* b, void* c) const {
  cublas_->multiply({.element = tools::MatrixProduct::Element::bf16,
                     .m = size,
                     .n = size,
                     .k = size,
                     .a = a,
                     .a_layout = tools::Layout::as_named,
                     .b = b,
                     .b_layout = tools::Layout::as_named,
                     .c = c,
                     .write = tools::MatrixProduct::Write::store});
}

}  // namespace megamoe::bench
