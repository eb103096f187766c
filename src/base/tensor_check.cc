#include "base/tensor_check.h"

#include <algorithm>
#include <cstdint>
#include <limits>

namespace megamoe::detail {
namespace {

/// "fp32 or bf16"
std::string text_of(std::initializer_list<DType> dtypes) {
  std::string text;
  for (const DType dtype : dtypes) {
    if (!text.empty()) text += " or ";
    text += to_string(dtype);
  }
  return text;
}

/// "[any, 64]"
std::string text_of(std::initializer_list<std::int64_t> sizes) {
  std::string text = "[";
  for (const std::int64_t size : sizes) {
    if (text.size() > 1) text += ", ";
    text += size == kAnySize ? "any" : std::to_string(size);
  }
  return text + "]";
}

bool contains(std::initializer_list<DType> dtypes, DType dtype) {
  return std::find(dtypes.begin(), dtypes.end(), dtype) != dtypes.end();
}

bool has_sizes(const ConstTensorView& tensor, std::initializer_list<std::int64_t> sizes) {
  if (tensor.num_dims != static_cast<int>(sizes.size())) return false;
  int dim = 0;
  for (const std::int64_t size : sizes) {
    const std::int64_t actual = tensor.sizes[dim++];
    if (actual < 0 || (size != kAnySize && actual != size)) return false;
  }
  return true;
}

bool is_empty(const ConstTensorView& tensor) {
  const auto end = tensor.sizes.begin() + tensor.num_dims;
  return std::find(tensor.sizes.begin(), end, 0) != end;
}

void check_strides(const char* name, const ConstTensorView& tensor, Access access) {
  const int last = tensor.num_dims - 1;
  if (tensor.sizes[last] > 1 && tensor.strides[last] != 1) {
    refuse(std::string(name) + " must have contiguous columns (last stride 1), is " +
           describe(tensor));
  }
  std::int64_t extent = tensor.sizes[last];  // elements from the first to the last so far
  bool fits = true;
  for (int dim = last - 1; dim >= 0; --dim) {
    if (tensor.sizes[dim] <= 1) continue;  // its stride is never used
    std::int64_t stride = tensor.strides[dim];
    if (stride < 0) refuse(std::string(name) + " has a negative stride: " + describe(tensor));
    if (access == Access::write && stride < extent) {
      refuse(std::string(name) + " is written, but its elements overlap: " + describe(tensor));
    }
    fits = fits && !__builtin_mul_overflow(tensor.sizes[dim] - 1, stride, &stride) &&
           !__builtin_add_overflow(extent, stride, &extent);
  }
  if (!fits || extent > std::numeric_limits<std::int64_t>::max() / dtype_bytes(tensor.dtype)) {
    refuse(std::string(name) + " spans more than 64 bits can address: " + describe(tensor));
  }
}

}  // namespace

void refuse(const std::string& message, ErrorCode code) { throw Error(code, message); }

// Valid calls are frequent and must not allocate: a text is made only when it is needed.
void check_tensor(const char* name, const ConstTensorView& tensor,
                  std::initializer_list<DType> dtypes, std::initializer_list<std::int64_t> sizes,
                  Access access) {
  if (tensor.absent()) {
    refuse(std::string(name) + " is absent, must be " + text_of(dtypes) + " " + text_of(sizes));
  }
  if (!contains(dtypes, tensor.dtype)) {
    if (tensor.dtype == DType::fp16 && contains(dtypes, DType::bf16)) {
      refuse(std::string(name) + " is fp16, which is not supported yet; use bf16",
             ErrorCode::unsupported);
    }
    refuse(std::string(name) + " must be " + text_of(dtypes) + ", is " + describe(tensor));
  }
  if (!has_sizes(tensor, sizes)) {
    refuse(std::string(name) + " must have shape " + text_of(sizes) + ", is " + describe(tensor));
  }
  if (is_empty(tensor)) return;  // nothing is read: pointer and strides are free
  if (tensor.data == nullptr) refuse(std::string(name) + " has no data: its pointer is null");
  const std::int64_t element_bytes = dtype_bytes(tensor.dtype);
  if (reinterpret_cast<std::uintptr_t>(tensor.data) % element_bytes != 0) {
    refuse(std::string(name) + " is not aligned to its element of " +
           std::to_string(element_bytes) + " bytes");
  }
  check_strides(name, tensor, access);
}

}  // namespace megamoe::detail
