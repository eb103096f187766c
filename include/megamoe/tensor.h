// Non-owning views of tensors: how every buffer is passed to the library.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <type_traits>

#include "megamoe/bf16.h"
#include "megamoe/error.h"

namespace megamoe {

enum class DType : std::uint8_t { bf16, fp16, fp32, fp64, int32, int64 };

/// Size of one element in bytes.
std::int64_t dtype_bytes(DType dtype);
/// "bf16", "fp32", ...
const char* to_string(DType dtype);

inline constexpr int kMaxTensorRank = 3;

/// A view of constant elements. Strides are in elements and may be anything the callee accepts;
/// what it does not accept is refused by the tensor's name. An absent tensor is a default-built
/// view.
struct ConstTensorView {
  const void* data = nullptr;
  DType dtype = DType::bf16;
  int num_dims = 0;
  std::array<std::int64_t, kMaxTensorRank> sizes{};
  std::array<std::int64_t, kMaxTensorRank> strides{};

  [[nodiscard]] bool absent() const { return num_dims == 0; }
};

/// A view of elements that the callee writes.
struct TensorView {
  void* data = nullptr;
  DType dtype = DType::bf16;
  int num_dims = 0;
  std::array<std::int64_t, kMaxTensorRank> sizes{};
  std::array<std::int64_t, kMaxTensorRank> strides{};

  [[nodiscard]] bool absent() const { return num_dims == 0; }
  // NOLINTNEXTLINE(google-explicit-constructor): dropping write access is always safe.
  operator ConstTensorView() const { return {data, dtype, num_dims, sizes, strides}; }
};

/// "bf16 [128, 64] with strides [64, 1]", for messages.
std::string describe(const ConstTensorView& tensor);

namespace detail {
template <class T>
constexpr DType dtype_of() {
  if constexpr (std::is_same_v<T, bf16>) {
    return DType::bf16;
  } else if constexpr (std::is_same_v<T, float>) {
    return DType::fp32;
  } else if constexpr (std::is_same_v<T, double>) {
    return DType::fp64;
  } else if constexpr (std::is_same_v<T, std::int32_t>) {
    return DType::int32;
  } else {
    static_assert(std::is_same_v<T, std::int64_t>, "no DType for this element type");
    return DType::int64;
  }
}

template <class View, class Pointer>
View contiguous_view(Pointer data, DType dtype, std::initializer_list<std::int64_t> sizes) {
  if (sizes.size() > kMaxTensorRank) {
    throw Error(ErrorCode::invalid_argument, "tensor_view takes at most " +
                                                 std::to_string(kMaxTensorRank) + " sizes, not " +
                                                 std::to_string(sizes.size()));
  }
  View view;
  view.data = data;
  view.dtype = dtype;
  view.num_dims = static_cast<int>(sizes.size());
  int dim = 0;
  for (const std::int64_t size : sizes) view.sizes[dim++] = size;
  std::int64_t stride = 1;
  for (dim = view.num_dims - 1; dim >= 0; --dim) {
    view.strides[dim] = stride;
    stride *= view.sizes[dim];
  }
  return view;
}
}  // namespace detail

/// A contiguous row-major view; the dtype follows from the pointer. Throws Error (invalid_argument)
/// for more than three dimensions.
template <class T>
TensorView tensor_view(T* data, std::initializer_list<std::int64_t> sizes) {
  return detail::contiguous_view<TensorView>(data, detail::dtype_of<T>(), sizes);
}
template <class T>
ConstTensorView tensor_view(const T* data, std::initializer_list<std::int64_t> sizes) {
  return detail::contiguous_view<ConstTensorView>(data, detail::dtype_of<T>(), sizes);
}

/// Reads a fused [e, 2I, H] weight (Hugging Face: gate rows, then up rows) as the half that starts
/// at row `first_row` and has `num_rows` rows, in place.
template <class View>
View expert_rows(View fused, std::int64_t first_row, std::int64_t num_rows) {
  View half = fused;
  using Byte = std::conditional_t<std::is_const_v<std::remove_pointer_t<decltype(fused.data)>>,
                                  const std::byte, std::byte>;
  half.data =
      static_cast<Byte*>(fused.data) + first_row * fused.strides[1] * dtype_bytes(fused.dtype);
  half.sizes[1] = num_rows;
  return half;
}

}  // namespace megamoe
