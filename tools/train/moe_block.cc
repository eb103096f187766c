#include "train/moe_block.h"

namespace megamoe::trainer {
namespace {

RouterConfig router_config(const ModelOptions& options) {
  RouterConfig config;
  config.num_experts = options.num_experts;
  config.top_k = options.top_k;
  config.score_function = ScoreFunction::softmax;
  config.weight_norm = WeightNorm::sum_to_one;
  config.aux_loss_alpha = static_cast<float>(options.aux_loss);
  return config;
}

}  // namespace

MoeBlock::MoeBlock(const std::string& name, const ModelOptions& options,
                   const LayerConfig& layer_config, TrainBackend& backend, Workspace& workspace,
                   ParameterGroup& shared, ParameterGroup& experts)
    : hidden_dim_(options.hidden_dim),
      intermediate_dim_(options.intermediate_dim),
      num_experts_(options.num_experts),
      num_local_experts_(options.num_experts / backend.group().size()),
      top_k_(options.top_k),
      backend_(backend),
      shared_(shared),
      experts_(experts),
      router_(backend.make_router({.config = router_config(options),
                                   .max_tokens = layer_config.shape.max_tokens,
                                   .hidden_dim = options.hidden_dim})),
      layer_(layer_config, backend.group(), workspace),
      d_router_weights_(kNumShards) {
  const std::int64_t expert_count = num_local_experts_ * intermediate_dim_ * hidden_dim_;
  parameters_ = {
      .norm = shared.add(name + ".norm", hidden_dim_, WeightDecay::none),
      .router_weight =
          shared.add(name + ".router", num_experts_ * hidden_dim_, WeightDecay::applies),
      .gate = experts.add(name + ".gate", expert_count, WeightDecay::applies),
      .up = experts.add(name + ".up", expert_count, WeightDecay::applies),
      .down = experts.add(name + ".down", expert_count, WeightDecay::applies),
  };
  const std::int64_t max_tokens = layer_config.shape.max_tokens;
  const std::int64_t max_elements = max_tokens * hidden_dim_;
  for (Buffer<float>* buffer : {&x_TH_, &wide_TH_}) {
    *buffer = Buffer<float>(backend, max_elements);
  }
  for (Buffer<bf16>* buffer : {&normed_TH_, &y_TH_, &dy_TH_, &d_normed_TH_}) {
    *buffer = Buffer<bf16>(backend, max_elements);
  }
  inverse_rms_T_ = Buffer<float>(backend, max_tokens);
  expert_ids_TK_ = Buffer<std::int32_t>(backend, max_tokens * top_k_);
  weights_TK_ = Buffer<float>(backend, max_tokens * top_k_);
  d_weights_TK_ = Buffer<float>(backend, max_tokens * top_k_);
}

void MoeBlock::forward(std::span<const Share> shards, float* x_TH, double* load) {
  Operations& operations = backend_.operations();
  const std::int64_t num_tokens = num_tokens_of(shards);
  const std::int64_t num_elements = num_tokens * hidden_dim_;
  operations.copy(x_TH_.data(), x_TH, num_elements * sizeof(float));
  operations.rms_norm(num_tokens, hidden_dim_, x_TH, shared_.values(parameters_.norm),
                      wide_TH_.data(), inverse_rms_T_.data());
  operations.round_to_bf16(num_elements, wide_TH_.data(), normed_TH_.data());
  router_->forward(shards, router_input(), {expert_ids_TK_.data(), weights_TK_.data()}, load);

  layer_context_ = CallContext();  // gives the memory of the last call back for this one
  layer_context_ = layer_.forward(
      {.x = tensor_view(normed_TH_.data(), {num_tokens, hidden_dim_}),
       .expert_ids = tensor_view(expert_ids_TK_.data(), {num_tokens, top_k_}),
       .weights = tensor_view(weights_TK_.data(), {num_tokens, top_k_}),
       .experts = expert_weights()},
      {.y = tensor_view(y_TH_.data(), {num_tokens, hidden_dim_})}, backend_.stream());
  operations.add_widened(num_elements, y_TH_.data(), x_TH);
}

// The gradient reaches the normed x on two ways, through the experts and through the router; both
// are summed in fp32 before the norm. x itself also passes the block unchanged: dx is added to.
void MoeBlock::backward(std::span<const Share> shards, float* dx_TH, const RouterLoad& global_load,
                        GradientShards& gradients) {
  Operations& operations = backend_.operations();
  const std::int64_t num_tokens = num_tokens_of(shards);
  const std::int64_t num_elements = num_tokens * hidden_dim_;
  operations.round_to_bf16(num_elements, dx_TH, dy_TH_.data());
  layer_.backward(layer_context_,
                  {.x = tensor_view(normed_TH_.data(), {num_tokens, hidden_dim_}),
                   .dy = tensor_view(dy_TH_.data(), {num_tokens, hidden_dim_}),
                   .experts = expert_weights()},
                  {.dx = tensor_view(d_normed_TH_.data(), {num_tokens, hidden_dim_}),
                   .dweights = tensor_view(d_weights_TK_.data(), {num_tokens, top_k_}),
                   .experts = expert_gradients()},
                  backend_.stream());
  operations.widen(num_elements, d_normed_TH_.data(), wide_TH_.data());

  for (std::size_t i = 0; i < shards.size(); ++i) {
    d_router_weights_[i] = gradients.of(static_cast<std::int64_t>(i), parameters_.router_weight);
  }
  router_->backward(shards, router_input(), d_weights_TK_.data(), global_load,
                    {wide_TH_.data(), std::span(d_router_weights_).first(shards.size())});
  for (std::size_t i = 0; i < shards.size(); ++i) {
    const std::int64_t first = shards[i].first * hidden_dim_;
    operations.add_rms_norm_gradients(
        shards[i].count, hidden_dim_, x_TH_.data() + first, shared_.values(parameters_.norm),
        inverse_rms_T_.data() + shards[i].first, wide_TH_.data() + first, dx_TH + first,
        gradients.of(static_cast<std::int64_t>(i), parameters_.norm));
  }
}

void MoeBlock::check() {
  layer_.check(backend_.stream());
  router_->check();
}

void MoeBlock::update_selection_bias(const RouterLoad& global_load, double rate) {
  router_->update_selection_bias(global_load, static_cast<float>(rate));
}

BlockRouter::Input MoeBlock::router_input() {
  return {normed_TH_.data(), shared_.values(parameters_.router_weight)};
}

ExpertWeights MoeBlock::expert_weights() const {
  return {
      .gate = tensor_view(experts_.rounded(parameters_.gate),
                          {num_local_experts_, intermediate_dim_, hidden_dim_}),
      .up = tensor_view(experts_.rounded(parameters_.up),
                        {num_local_experts_, intermediate_dim_, hidden_dim_}),
      .down = tensor_view(experts_.rounded(parameters_.down),
                          {num_local_experts_, hidden_dim_, intermediate_dim_}),
  };
}

ExpertGradients MoeBlock::expert_gradients() {
  return {
      .gate = tensor_view(experts_.gradients(parameters_.gate),
                          {num_local_experts_, intermediate_dim_, hidden_dim_}),
      .up = tensor_view(experts_.gradients(parameters_.up),
                        {num_local_experts_, intermediate_dim_, hidden_dim_}),
      .down = tensor_view(experts_.gradients(parameters_.down),
                          {num_local_experts_, hidden_dim_, intermediate_dim_}),
  };
}

}  // namespace megamoe::trainer
