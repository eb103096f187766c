// Argument checks that every entry point shares: dtype, shape, strides and alignment of a view.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>

#include "megamoe/error.h"
#include "megamoe/tensor.h"

namespace megamoe::detail {

/// A size that the check does not prescribe.
inline constexpr std::int64_t kAnySize = -1;

/// Rows of a written tensor must not overlap; those of a read one may (an expanded tensor has
/// stride 0).
enum class Access : std::uint8_t { read, write };

[[noreturn]] void refuse(const std::string& message, ErrorCode code = ErrorCode::invalid_argument);

/// Throws an Error whose message begins with `name` and says what was expected and what came,
/// unless the tensor is present, has one of the dtypes and the sizes, and, if it has elements, a
/// pointer that is aligned to them and not null, an inner stride of 1, and outer strides that suit
/// the access and stay within 64 bits. The code is invalid_argument, but unsupported for fp16 where
/// bf16 would do.
void check_tensor(const char* name, const ConstTensorView& tensor,
                  std::initializer_list<DType> dtypes, std::initializer_list<std::int64_t> sizes,
                  Access access);

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
