// From torch tensors to the library's views: what is read in place, what is copied, what is
// refused.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "megamoe/megamoe.h"

namespace megamoe::torch_ops {

using torch::stable::Tensor;

/// Throws unsupported for an element type that no tensor of the library has.
DType dtype_of(const char* name, const Tensor& tensor);

ConstTensorView const_view(const char* name, const Tensor& tensor);
TensorView view(const char* name, const Tensor& tensor);

/// "[2, 3]"
std::string text_of(const std::vector<std::int64_t>& sizes);
std::vector<std::int64_t> sizes_of(const Tensor& tensor);
/// All sizes but the last. Throws invalid_argument for a scalar.
std::vector<std::int64_t> leading_sizes(const char* name, const Tensor& tensor);

/// [..., C] as [rows, C] with contiguous columns: in place where strides allow it, else a copy.
Tensor as_matrix(const char* name, const Tensor& tensor);
/// The same for rows that a device moves in vectors: a copy also where they are not aligned.
Tensor as_rows(const char* name, const Tensor& tensor);

/// Expert ids as an int32 matrix. On the CPU int64 is converted; a value that is neither -1 nor
/// from 0 to num_experts - 1 throws expert_id_out_of_range, naming value and place. On a device
/// int64 is refused: who calls the operator converts it there (megamoe.moe does).
Tensor as_ids(const Tensor& expert_ids, std::int64_t num_experts);

/// The halves of a fused [e, 2I, H] tensor, in place.
template <class View>
struct GateUp {
  View gate;  ///< absent where the activation has no gate
  View up;
};
template <class View>
GateUp<View> split_gate_up(const View& fused, bool gated) {
  if (!gated) return {View{}, fused};
  const std::int64_t half = fused.sizes[1] / 2;
  return {expert_rows(fused, 0, half), expert_rows(fused, half, half)};
}

/// torch's current stream of the tensor's device; the CPU has none.
Stream current_stream(const Tensor& tensor);
Stream current_stream(int device);

/// Where the call runs: the host, or a device with torch's current stream of it. The device is the
/// current one meanwhile.
struct Place {
  explicit Place(const Tensor& x) {
    if (!x.is_cuda()) return;
    device = x.get_device_index();
    guard.emplace(device);
    stream = current_stream(device);
  }
  [[nodiscard]] bool on_host() const { return !guard.has_value(); }

  int device = 0;
  Stream stream;
  std::optional<torch::stable::accelerator::DeviceGuard> guard;
};

/// An uninitialised contiguous tensor on the device and, unless `dtype` is given, with the
/// element type of `like`.
Tensor empty(const Tensor& like, const std::vector<std::int64_t>& sizes,
             std::optional<torch::headeronly::ScalarType> dtype = std::nullopt);

}  // namespace megamoe::torch_ops
