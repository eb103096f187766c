#include "train/cuda/cuda_block_router.h"

namespace megamoe::trainer::cuda {

CudaBlockRouter::CudaBlockRouter(const BlockRouterShape& shape, TrainBackend& backend)
    : hidden_dim_(shape.hidden_dim),
      num_experts_(shape.config.num_experts),
      top_k_(shape.config.top_k),
      backend_(backend),
      router_(shape.config, backend.group().device()),
      host_router_(shape.config),
      wide_x_TH_(backend, shape.max_tokens * hidden_dim_),
      logits_TE_(backend, shape.max_tokens * num_experts_),
      expert_ids_TK_(backend, shape.max_tokens * top_k_),
      d_logits_TE_(backend, shape.max_tokens * num_experts_),
      global_load_(backend, 2 * num_experts_ + 1),
      selection_bias_E_(backend, num_experts_) {}

void CudaBlockRouter::forward(std::span<const Share> shards, const Input& input,
                              const Routing& routing, double* load) {
  Operations& operations = backend_.operations();
  const Stream stream = backend_.stream();
  const std::int64_t num_tokens = num_tokens_of(shards);
  operations.widen(num_tokens * hidden_dim_, input.x_TH, wide_x_TH_.data());
  operations.multiply_by_transposed(shards, {num_experts_, hidden_dim_}, wide_x_TH_.data(),
                                    input.weight_EH, logits_TE_.data());
  const ConstTensorView logits = tensor_view(logits_TE_.data(), {num_tokens, num_experts_});
  const TensorView ids = tensor_view(routing.expert_ids_TK, {num_tokens, top_k_});
  RouterInputs inputs;
  inputs.logits = logits;
  inputs.selection_bias = tensor_view(selection_bias_E_.data(), {num_experts_});
  router_.forward(
      inputs, {.expert_ids = ids, .weights = tensor_view(routing.weights_TK, {num_tokens, top_k_})},
      stream);
  operations.copy(expert_ids_TK_.data(), routing.expert_ids_TK,
                  num_tokens * top_k_ * sizeof(std::int32_t));
  const std::int64_t load_count = global_load_.count();
  operations.zero(load, load_count * sizeof(double));
  router_.add_load(logits, ids, tensor_view(load, {load_count}), stream);
}

ConstTensorView CudaBlockRouter::upload(const RouterLoad& global_load) {
  const std::span<const double> values = global_load.values();
  backend_.upload(global_load_.data(), values.data(), values.size_bytes());
  return tensor_view(global_load_.data(), {global_load_.count()});
}

void CudaBlockRouter::backward(std::span<const Share> shards, const Input& input,
                               const float* d_weights_TK, const RouterLoad& global_load,
                               const Gradients& gradients) {
  Operations& operations = backend_.operations();
  const std::int64_t num_tokens = num_tokens_of(shards);
  CudaRouterBackwardInputs inputs;
  inputs.logits = tensor_view(logits_TE_.data(), {num_tokens, num_experts_});
  inputs.expert_ids = tensor_view(expert_ids_TK_.data(), {num_tokens, top_k_});
  inputs.d_weights = tensor_view(d_weights_TK, {num_tokens, top_k_});
  inputs.global_load = upload(global_load);
  router_.backward(inputs, tensor_view(d_logits_TE_.data(), {num_tokens, num_experts_}),
                   backend_.stream());
  operations.add_product(shards, {hidden_dim_, num_experts_}, d_logits_TE_.data(), input.weight_EH,
                         gradients.d_x_TH);
  for (std::size_t i = 0; i < shards.size(); ++i) {
    operations.add_product_over_tokens(shards[i].count, num_experts_, hidden_dim_,
                                       d_logits_TE_.data() + shards[i].first * num_experts_,
                                       wide_x_TH_.data() + shards[i].first * hidden_dim_,
                                       gradients.d_weight_SEH[i]);
  }
}

double CudaBlockRouter::aux_loss(const RouterLoad& global_load) const {
  return host_router_.aux_loss(global_load);
}

void CudaBlockRouter::update_selection_bias(const RouterLoad& global_load, float rate) {
  router_.update_selection_bias(upload(global_load), rate,
                                tensor_view(selection_bias_E_.data(), {num_experts_}),
                                backend_.stream());
}

void CudaBlockRouter::check() { router_.check(backend_.stream()); }

}  // namespace megamoe::trainer::cuda
