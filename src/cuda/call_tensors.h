// The tensors of a call as kernels take them.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/exchange/exchange.h"
#include "kernels/reduce/reduce.h"
#include "megamoe/layer.h"
#include "megamoe/tensor.h"

namespace megamoe::cuda {

inline gpu::RowsInput rows_input(const ConstTensorView& tensor) {
  return {static_cast<const bf16*>(tensor.data), tensor.strides[0]};
}
inline gpu::RowsOutput rows_output(const TensorView& tensor) {
  return {static_cast<bf16*>(tensor.data), tensor.strides[0]};
}
inline gpu::DweightsOutput dweights_output(const TensorView& tensor) {
  return {static_cast<float*>(tensor.data), tensor.strides[0]};
}
inline bf16* rows_of(const TensorView& tensor) { return static_cast<bf16*>(tensor.data); }
inline gpu::RoutingInput routing_input(const ForwardInput& input) {
  return {static_cast<const std::int32_t*>(input.expert_ids.data), input.expert_ids.strides[0],
          static_cast<const float*>(input.weights.data), input.weights.strides[0]};
}

/// Strides of dimensions with one element say nothing, but tensor maps check them.
template <class View>
View with_plain_strides(View tensor) {
  std::int64_t next = 1;
  for (int dim = tensor.num_dims - 1; dim >= 0; --dim) {
    if (tensor.sizes[dim] == 1 && dim != tensor.num_dims - 1) tensor.strides[dim] = next;
    next = std::max(next, tensor.strides[dim] * tensor.sizes[dim]);
  }
  return tensor;
}
inline ExpertWeights with_plain_strides(const ExpertWeights& experts) {
  return {with_plain_strides(experts.gate), with_plain_strides(experts.up),
          with_plain_strides(experts.down)};
}

}  // namespace megamoe::cuda
