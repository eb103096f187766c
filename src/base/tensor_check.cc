#include "base/tensor_check.h"

#include <algorithm>
#include <cstdint>

#include "megamoe/error.h"

namespace megamoe::detail {
namespace {

std::string expectation(std::initializer_list<DType> dtypes,
                        std::initializer_list<std::int64_t> sizes) {
  std::string text;
  for (const DType dtype : dtypes) {
    if (!text.empty()) text += " or ";
    text += to_string(dtype);
  }
  text += " [";
  bool first = true;
  for (const std::int64_t size : sizes) {
    if (!first) text += ", ";
    first = false;
    text += size == kAnySize ? "any" : std::to_string(size);
  }
  return text + "]";
}

bool rows_are_readable(const ConstTensorView& tensor) {
  std::int64_t extent = 1;  // elements from the first to the last of one index of the outer dims
  for (int dim = tensor.num_dims - 1; dim >= 0; --dim) {
    if (tensor.sizes[dim] <= 1) continue;  // the stride of such a dimension is never used
    const bool is_inner = dim == tensor.num_dims - 1;
    if (is_inner ? tensor.strides[dim] != 1 : tensor.strides[dim] < extent) return false;
    extent += (tensor.sizes[dim] - 1) * tensor.strides[dim];
  }
  return true;
}

}  // namespace

void refuse(const std::string& message) { throw Error(ErrorCode::invalid_argument, message); }

void check_tensor(const char* name, const ConstTensorView& tensor,
                  std::initializer_list<DType> dtypes, std::initializer_list<std::int64_t> sizes) {
  const auto got = [&] {
    return std::string(name) + " must be " + expectation(dtypes, sizes) + ", got " +
           describe(tensor);
  };
  if (tensor.num_dims != static_cast<int>(sizes.size())) refuse(got());
  if (std::find(dtypes.begin(), dtypes.end(), tensor.dtype) == dtypes.end()) refuse(got());
  bool empty = false;
  int dim = 0;
  for (const std::int64_t size : sizes) {
    const std::int64_t actual = tensor.sizes[dim++];
    if (actual < 0 || (size != kAnySize && actual != size)) refuse(got());
    empty = empty || actual == 0;
  }
  if (empty) return;
  if (!rows_are_readable(tensor)) {
    refuse(std::string(name) +
           " must have an inner stride of 1 and rows that do not overlap, got " + describe(tensor));
  }
  if (tensor.data == nullptr) refuse(std::string(name) + " has a null pointer");
  if (reinterpret_cast<std::uintptr_t>(tensor.data) % dtype_bytes(tensor.dtype) != 0) {
    refuse(std::string(name) + " must be aligned to " + std::to_string(dtype_bytes(tensor.dtype)) +
           " bytes");
  }
}

}  // namespace megamoe::detail
