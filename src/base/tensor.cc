#include "megamoe/tensor.h"

#include <algorithm>

namespace megamoe {

std::int64_t dtype_bytes(DType dtype) {
  switch (dtype) {
    case DType::bf16:
    case DType::fp16:
      return 2;
    case DType::fp32:
    case DType::int32:
      return 4;
    case DType::fp64:
    case DType::int64:
      return 8;
  }
  return 0;
}

const char* to_string(DType dtype) {
  switch (dtype) {
    case DType::bf16:
      return "bf16";
    case DType::fp16:
      return "fp16";
    case DType::fp32:
      return "fp32";
    case DType::fp64:
      return "fp64";
    case DType::int32:
      return "int32";
    case DType::int64:
      return "int64";
  }
  return "unknown";
}

std::string describe(const ConstTensorView& tensor) {
  if (tensor.absent()) return "absent";
  const auto list = [&](const auto& values) {
    std::string text = "[";
    for (int dim = 0; dim < std::min(tensor.num_dims, kMaxTensorRank); ++dim) {
      if (dim > 0) text += ", ";
      text += std::to_string(values[dim]);
    }
    return text + "]";
  };
  return std::string(to_string(tensor.dtype)) + " " + list(tensor.sizes) + " with strides " +
         list(tensor.strides);
}

}  // namespace megamoe
