// Argument checks that every entry point shares: dtype, shape, strides and alignment of a view.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>

#include "megamoe/tensor.h"

namespace megamoe::detail {

/// A size that the check does not prescribe.
inline constexpr std::int64_t kAnySize = -1;

[[noreturn]] void refuse(const std::string& message);

/// Throws invalid_argument, naming the tensor and saying what was expected and what came, unless it
/// is present, has one of the dtypes and the sizes, an inner stride of 1, outer strides that keep
/// rows apart, and a pointer that is aligned to its elements and not null (unless it is empty).
void check_tensor(const char* name, const ConstTensorView& tensor,
                  std::initializer_list<DType> dtypes, std::initializer_list<std::int64_t> sizes);

/// First element of row `row` of a checked matrix.
template <class T>
const T* row_of(const ConstTensorView& matrix, std::int64_t row) {
  return static_cast<const T*>(matrix.data) + row * matrix.strides[0];
}
template <class T>
T* row_of(const TensorView& matrix, std::int64_t row) {
  return static_cast<T*>(matrix.data) + row * matrix.strides[0];
}

}  // namespace megamoe::detail
