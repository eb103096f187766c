#include "cuda/check_arguments.h"

#include <cstdint>
#include <string>

#include "cuda/device_check.h"
#include "cuda/runtime.h"

namespace megamoe::cuda {
namespace {

constexpr std::int64_t kAlignment = 16;

/// Elements, which may lie anywhere.
void check_elements(int device, const ConstTensorView& tensor, const char* name) {
  check_memory(device, tensor, name, "the layer's rank");
}

/// Rows that are moved in vectors.
void check_rows(int device, const ConstTensorView& tensor, const char* name) {
  if (has_no_elements(tensor)) return;
  check_memory(device, tensor, name, "the layer's rank");
  if (reinterpret_cast<std::uintptr_t>(tensor.data) % kAlignment != 0) {
    throw Error(ErrorCode::invalid_argument,
                std::string(name) + " must be aligned to 16 bytes on the cuda backend");
  }
  for (int dim = 0; dim < tensor.num_dims - 1; ++dim) {
    const std::int64_t bytes = tensor.strides[dim] * dtype_bytes(tensor.dtype);
    if (tensor.sizes[dim] > 1 && bytes % kAlignment != 0) {
      throw Error(ErrorCode::invalid_argument,
                  std::string(name) +
                      " must have strides of a multiple of 16 bytes on the cuda "
                      "backend, is " +
                      describe(tensor));
    }
  }
}

void check_experts(int device, const ExpertWeights& experts) {
  check_rows(device, experts.gate, "experts.gate");
  check_rows(device, experts.up, "experts.up");
  check_rows(device, experts.down, "experts.down");
}

}  // namespace

void check_forward_memory(int device, const ForwardInput& input, const ForwardOutput& output) {
  check_rows(device, input.x, "x");
  check_elements(device, input.expert_ids, "expert_ids");
  check_elements(device, input.weights, "weights");
  check_experts(device, input.experts);
  check_rows(device, output.y, "y");
}

void check_backward_memory(int device, const BackwardInput& input, const BackwardOutput& output) {
  check_rows(device, input.x, "x");
  check_rows(device, input.dy, "dy");
  check_experts(device, input.experts);
  check_rows(device, output.dx, "dx");
  check_elements(device, output.dweights, "dweights");
  check_rows(device, output.experts.gate, "gradients of experts.gate");
  check_rows(device, output.experts.up, "gradients of experts.up");
  check_rows(device, output.experts.down, "gradients of experts.down");
}

}  // namespace megamoe::cuda
