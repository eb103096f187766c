#include "layer/validate.h"

#include <array>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <string>

namespace megamoe {
namespace {

[[noreturn]] void refuse(const char* name, const std::string& why,
                         ErrorCode code = ErrorCode::invalid_argument) {
  throw Error(code, std::string(name) + " " + why);
}

std::string list(std::initializer_list<std::int64_t> sizes) {
  std::string text = "[";
  for (const std::int64_t size : sizes) {
    if (text.size() > 1) text += ", ";
    text += std::to_string(size);
  }
  return text + "]";
}

enum class Access : std::uint8_t { read, write };

/// Rows of a written tensor must not overlap; those of a read one may (an expanded tensor has
/// stride 0).
void check_strides(const char* name, const ConstTensorView& tensor, Access access) {
  const int last = tensor.num_dims - 1;
  if (tensor.sizes[last] > 1 && tensor.strides[last] != 1) {
    refuse(name, "must have contiguous columns (last stride 1), is " + describe(tensor));
  }
  std::int64_t extent = tensor.sizes[last];
  for (int dim = last - 1; dim >= 0; --dim) {
    if (tensor.sizes[dim] <= 1) continue;
    std::int64_t stride = tensor.strides[dim];
    if (stride < 0) refuse(name, "has a negative stride: " + describe(tensor));
    if (access == Access::write && stride < extent) {
      refuse(name, "is written, but its elements overlap: " + describe(tensor));
    }
    if (__builtin_mul_overflow(tensor.sizes[dim] - 1, stride, &stride) ||
        __builtin_add_overflow(extent, stride, &extent)) {
      refuse(name, "spans more than 64 bits can address: " + describe(tensor));
    }
  }
  if (extent > std::numeric_limits<std::int64_t>::max() / dtype_bytes(tensor.dtype)) {
    refuse(name, "spans more than 64 bits can address: " + describe(tensor));
  }
}

void check_tensor(const char* name, const ConstTensorView& tensor, DType dtype,
                  std::initializer_list<std::int64_t> sizes, Access access) {
  if (tensor.absent()) {
    refuse(name, "is absent, must be " + std::string(to_string(dtype)) + " " + list(sizes));
  }
  if (tensor.dtype == DType::fp16 && dtype == DType::bf16) {
    refuse(name, "is fp16, which is not supported yet; use bf16", ErrorCode::unsupported);
  }
  if (tensor.dtype != dtype) {
    refuse(name, "must be " + std::string(to_string(dtype)) + ", is " + describe(tensor));
  }
  if (tensor.num_dims != static_cast<int>(sizes.size())) {
    refuse(name, "must have shape " + list(sizes) + ", is " + describe(tensor));
  }
  std::int64_t num_elements = 1;
  int dim = 0;
  for (const std::int64_t size : sizes) {
    if (tensor.sizes[dim++] != size) {
      refuse(name, "must have shape " + list(sizes) + ", is " + describe(tensor));
    }
    num_elements *= size;
  }
  if (num_elements == 0) return;  // nothing is read: pointer and strides are free
  if (tensor.data == nullptr) refuse(name, "has no data: its pointer is null");
  if (reinterpret_cast<std::uintptr_t>(tensor.data) % dtype_bytes(dtype) != 0) {
    refuse(name,
           "is not aligned to its element of " + std::to_string(dtype_bytes(dtype)) + " bytes");
  }
  check_strides(name, tensor, access);
}

/// T comes from this tensor alone: its first size is free up to max_tokens.
std::int64_t check_num_tokens(const char* name, const ConstTensorView& tensor,
                              std::int64_t max_tokens) {
  if (tensor.num_dims != 2) {
    refuse(name, "must have two dimensions, [tokens, hidden], is " + describe(tensor));
  }
  const std::int64_t num_tokens = tensor.sizes[0];
  if (num_tokens < 0 || num_tokens > max_tokens) {
    refuse(name, "has " + std::to_string(num_tokens) + " tokens; shape.max_tokens is " +
                     std::to_string(max_tokens));
  }
  return num_tokens;
}

void check_experts(const ExpectedShape& expected, const ExpertWeights& experts) {
  const std::int64_t num_experts = expected.experts_per_rank;
  const std::int64_t hidden = expected.shape.hidden_dim;
  const std::int64_t intermediate = expected.shape.intermediate_dim;
  if (expected.gated) {
    check_tensor("experts.gate", experts.gate, DType::bf16, {num_experts, intermediate, hidden},
                 Access::read);
  } else if (!experts.gate.absent()) {
    refuse("experts.gate", "must be absent: the activation has no gate");
  }
  check_tensor("experts.up", experts.up, DType::bf16, {num_experts, intermediate, hidden},
               Access::read);
  check_tensor("experts.down", experts.down, DType::bf16, {num_experts, hidden, intermediate},
               Access::read);
}

void check_gradients(const ExpectedShape& expected, const ExpertGradients& gradients) {
  const std::int64_t num_experts = expected.experts_per_rank;
  const std::int64_t hidden = expected.shape.hidden_dim;
  const std::int64_t intermediate = expected.shape.intermediate_dim;
  const DType dtype =
      expected.weight_gradient_mode == WeightGradientMode::store_bf16 ? DType::bf16 : DType::fp32;
  if (expected.gated) {
    check_tensor("gradients of experts.gate", gradients.gate, dtype,
                 {num_experts, intermediate, hidden}, Access::write);
  } else if (!gradients.gate.absent()) {
    refuse("gradients of experts.gate", "must be absent: the activation has no gate");
  }
  check_tensor("gradients of experts.up", gradients.up, dtype, {num_experts, intermediate, hidden},
               Access::write);
  check_tensor("gradients of experts.down", gradients.down, dtype,
               {num_experts, hidden, intermediate}, Access::write);
}

}  // namespace

ExpectedShape expected_shape(const LayerConfig& config, int num_ranks) {
  return {config.shape, config.shape.num_experts / num_ranks, is_gated(config.activation.kind),
          config.weight_gradient_mode};
}

std::int64_t validate_forward(const ExpectedShape& expected, const ForwardInput& input,
                              const ForwardOutput& output) {
  const MoeShape& shape = expected.shape;
  const std::int64_t num_tokens = check_num_tokens("x", input.x, shape.max_tokens);
  check_tensor("x", input.x, DType::bf16, {num_tokens, shape.hidden_dim}, Access::read);
  check_tensor("expert_ids", input.expert_ids, DType::int32, {num_tokens, shape.top_k},
               Access::read);
  check_tensor("weights", input.weights, DType::fp32, {num_tokens, shape.top_k}, Access::read);
  check_tensor("y", output.y, DType::bf16, {num_tokens, shape.hidden_dim}, Access::write);
  check_experts(expected, input.experts);
  return num_tokens;
}

void validate_backward(const ExpectedShape& expected, std::int64_t num_tokens,
                       const BackwardInput& input, const BackwardOutput& output) {
  const MoeShape& shape = expected.shape;
  check_tensor("x", input.x, DType::bf16, {num_tokens, shape.hidden_dim}, Access::read);
  check_tensor("dy", input.dy, DType::bf16, {num_tokens, shape.hidden_dim}, Access::read);
  check_tensor("dx", output.dx, DType::bf16, {num_tokens, shape.hidden_dim}, Access::write);
  check_tensor("dweights", output.dweights, DType::fp32, {num_tokens, shape.top_k}, Access::write);
  check_experts(expected, input.experts);
  check_gradients(expected, output.experts);
}

}  // namespace megamoe
