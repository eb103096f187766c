#include "tensors.h"

#include <dlfcn.h>

#include <cstdint>

namespace megamoe::torch_ops {
namespace {

using torch::headeronly::ScalarType;

template <class View>
View view_of(const char* name, const Tensor& tensor) {
  const std::int64_t num_dims = tensor.dim();
  if (num_dims < 1 || num_dims > kMaxTensorRank) {
    throw Error(ErrorCode::invalid_argument,
                std::string(name) + " has shape " + text_of(sizes_of(tensor)) +
                    ", must have from 1 to " + std::to_string(kMaxTensorRank) + " dimensions");
  }
  View result;
  result.data = tensor.data_ptr();
  result.dtype = dtype_of(name, tensor);
  result.num_dims = static_cast<int>(num_dims);
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  for (int dim = 0; dim < result.num_dims; ++dim) {
    result.sizes[dim] = sizes[dim];
    result.strides[dim] = strides[dim];
  }
  return result;
}

}  // namespace

DType dtype_of(const char* name, const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::BFloat16:
      return DType::bf16;
    case ScalarType::Half:
      return DType::fp16;
    case ScalarType::Float:
      return DType::fp32;
    case ScalarType::Double:
      return DType::fp64;
    case ScalarType::Int:
      return DType::int32;
    case ScalarType::Long:
      return DType::int64;
    default:
      throw Error(
          ErrorCode::unsupported,
          std::string(name) +
              " has an element type that megamoe does not read; it reads bf16 (x and expert "
              "weights), fp32 (routing weights), int32 and int64 (expert ids)");
  }
}

ConstTensorView const_view(const char* name, const Tensor& tensor) {
  return view_of<ConstTensorView>(name, tensor);
}
TensorView view(const char* name, const Tensor& tensor) {
  return view_of<TensorView>(name, tensor);
}

std::string text_of(const std::vector<std::int64_t>& sizes) {
  std::string text = "[";
  for (const std::int64_t size : sizes) {
    if (text.size() > 1) text += ", ";
    text += std::to_string(size);
  }
  return text + "]";
}

std::vector<std::int64_t> sizes_of(const Tensor& tensor) {
  const auto sizes = tensor.sizes();
  return {sizes.begin(), sizes.end()};
}

std::vector<std::int64_t> leading_sizes(const char* name, const Tensor& tensor) {
  if (tensor.dim() < 1) {
    throw Error(ErrorCode::invalid_argument,
                std::string(name) + " is a scalar, must be [..., size]");
  }
  std::vector<std::int64_t> sizes = sizes_of(tensor);
  sizes.pop_back();
  return sizes;
}

Tensor as_matrix(const char* name, const Tensor& tensor) {
  std::int64_t num_rows = 1;
  for (const std::int64_t size : leading_sizes(name, tensor)) num_rows *= size;
  const std::int64_t num_columns = tensor.sizes()[tensor.dim() - 1];
  const bool columns_contiguous = num_columns <= 1 || tensor.strides()[tensor.dim() - 1] == 1;
  if (tensor.dim() == 2 && columns_contiguous) return tensor;
  return torch::stable::view(torch::stable::contiguous(tensor), {num_rows, num_columns});
}

Tensor as_rows(const char* name, const Tensor& tensor) {
  Tensor matrix = as_matrix(name, tensor);
  if (!tensor.is_cuda()) return matrix;
  constexpr std::int64_t kAlignment = 16;
  const std::int64_t row_bytes = matrix.strides()[0] * dtype_bytes(dtype_of(name, matrix));
  const bool rows_aligned = matrix.sizes()[0] <= 1 || row_bytes % kAlignment == 0;
  const auto address = reinterpret_cast<std::uintptr_t>(matrix.data_ptr());
  if (rows_aligned && address % kAlignment == 0) return matrix;
  return torch::stable::contiguous(torch::stable::clone(matrix));
}

Tensor as_ids(const Tensor& expert_ids, std::int64_t num_experts) {
  Tensor ids = as_matrix("expert_ids", expert_ids);
  const DType dtype = dtype_of("expert_ids", ids);
  if (dtype != DType::int32 && dtype != DType::int64) {
    throw Error(ErrorCode::invalid_argument,
                "expert_ids must be int32 or int64, is " + describe(const_view("expert_ids", ids)));
  }
  if (dtype == DType::int32) return ids;
  if (ids.is_cuda()) {
    throw Error(ErrorCode::invalid_argument,
                "expert_ids is int64 on a CUDA device, where the operator takes int32; megamoe.moe "
                "converts it");
  }
  const std::int64_t num_rows = ids.sizes()[0];
  const std::int64_t num_columns = ids.sizes()[1];
  Tensor converted = torch::stable::new_empty(ids, {num_rows, num_columns}, ScalarType::Int);
  const auto* source = static_cast<const std::int64_t*>(ids.const_data_ptr());
  auto* target = static_cast<std::int32_t*>(converted.mutable_data_ptr());
  const std::int64_t row_stride = ids.strides()[0];
  for (std::int64_t row = 0; row < num_rows; ++row) {
    for (std::int64_t column = 0; column < num_columns; ++column) {
      const std::int64_t value = source[row * row_stride + column];
      if (value < -1 || value >= num_experts) {
        throw Error(ErrorCode::expert_id_out_of_range,
                    "expert_ids[" + std::to_string(row) + ", " + std::to_string(column) + "] is " +
                        std::to_string(value) + ", must be -1 or from 0 to " +
                        std::to_string(num_experts - 1));
      }
      target[row * num_columns + column] = static_cast<std::int32_t>(value);
    }
  }
  return converted;
}

Stream current_stream(const Tensor& tensor) {
  return tensor.is_cuda() ? current_stream(tensor.get_device_index()) : Stream{};
}

Stream current_stream(int device) {
  // Of torch's CUDA library, which a CPU build of torch does not have: it cannot be linked.
  using Function = std::int32_t (*)(std::int32_t, void**);
  static const auto function = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    void* symbol =
        library == nullptr ? nullptr : dlsym(library, "aoti_torch_get_current_cuda_stream");
    return reinterpret_cast<Function>(symbol);
  }();
  Stream stream;
  if (function == nullptr || function(device, &stream.handle) != 0) {
    throw Error(ErrorCode::internal,
                "torch does not tell its current stream of CUDA device " + std::to_string(device));
  }
  return stream;
}

Tensor empty(const Tensor& like, const std::vector<std::int64_t>& sizes,
             std::optional<ScalarType> dtype) {
  return torch::stable::new_empty(like, sizes, dtype);
}

}  // namespace megamoe::torch_ops
