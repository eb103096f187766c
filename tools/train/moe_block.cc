#include "train/moe_block.h"

#include "train/dense_ops.h"

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

void round_to_bf16(std::int64_t count, const float* from, bf16* to) {
  for (std::int64_t i = 0; i < count; ++i) to[i] = to_bf16(from[i]);
}

}  // namespace

MoeBlock::MoeBlock(const std::string& name, const ModelOptions& options,
                   const LayerConfig& layer_config, Communicator& communicator,
                   Workspace& workspace, ParameterGroup& shared, ParameterGroup& experts)
    : hidden_dim_(options.hidden_dim),
      intermediate_dim_(options.intermediate_dim),
      num_experts_(options.num_experts),
      num_local_experts_(options.num_experts / communicator.size()),
      top_k_(options.top_k),
      shared_(shared),
      experts_(experts),
      router_(router_config(options)),
      layer_(layer_config, communicator, workspace),
      load_(options.num_experts),
      selection_bias_E_(options.num_experts) {
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
  for (std::vector<float>* buffer : {&x_TH_, &wide_TH_}) buffer->resize(max_elements);
  for (std::vector<bf16>* buffer : {&normed_TH_, &y_TH_, &dy_TH_, &d_normed_TH_}) {
    buffer->resize(max_elements);
  }
  inverse_rms_T_.resize(max_tokens);
  expert_ids_TK_.resize(max_tokens * top_k_);
  weights_TK_.resize(max_tokens * top_k_);
  d_weights_TK_.resize(max_tokens * top_k_);
}

void MoeBlock::forward(std::int64_t num_tokens, float* x_TH) {
  const std::int64_t num_elements = num_tokens * hidden_dim_;
  std::copy_n(x_TH, num_elements, x_TH_.data());
  rms_norm(num_tokens, hidden_dim_, x_TH, shared_.values(parameters_.norm), wide_TH_.data(),
           inverse_rms_T_.data());
  round_to_bf16(num_elements, wide_TH_.data(), normed_TH_.data());
  const TensorView normed = tensor_view(normed_TH_.data(), {num_tokens, hidden_dim_});
  const TensorView expert_ids = tensor_view(expert_ids_TK_.data(), {num_tokens, top_k_});
  const TensorView weights = tensor_view(weights_TK_.data(), {num_tokens, top_k_});

  router_.forward({.x = normed,
                   .router_weight = router_weight(),
                   .logits = {},
                   .selection_bias = tensor_view(selection_bias_E_.data(), {num_experts_}),
                   .forced_ids = {}},
                  {.expert_ids = expert_ids, .weights = weights}, router_context_);
  load_.clear();
  router_.add_load(router_context_, load_);

  layer_context_ = CallContext();  // gives the memory of the last call back for this one
  layer_context_ = layer_.forward(
      {.x = normed, .expert_ids = expert_ids, .weights = weights, .experts = expert_weights()},
      {.y = tensor_view(y_TH_.data(), {num_tokens, hidden_dim_})});
  for (std::int64_t i = 0; i < num_elements; ++i) x_TH[i] += to_float(y_TH_[i]);
}

// The gradient reaches the normed x on two ways, through the experts and through the router; both
// are summed in fp32 before the norm. x itself also passes the block unchanged: dx is added to.
void MoeBlock::backward(std::int64_t num_tokens, float* dx_TH, const RouterLoad& global_load) {
  const std::int64_t num_elements = num_tokens * hidden_dim_;
  round_to_bf16(num_elements, dx_TH, dy_TH_.data());
  const TensorView normed = tensor_view(normed_TH_.data(), {num_tokens, hidden_dim_});
  const TensorView d_weights = tensor_view(d_weights_TK_.data(), {num_tokens, top_k_});
  layer_.backward(layer_context_,
                  {.x = normed,
                   .dy = tensor_view(dy_TH_.data(), {num_tokens, hidden_dim_}),
                   .experts = expert_weights()},
                  {.dx = tensor_view(d_normed_TH_.data(), {num_tokens, hidden_dim_}),
                   .dweights = d_weights,
                   .experts = expert_gradients()});

  for (std::int64_t i = 0; i < num_elements; ++i) wide_TH_[i] = to_float(d_normed_TH_[i]);
  router_.backward(router_context_,
                   {.d_weights = d_weights,
                    .x = normed,
                    .router_weight = router_weight(),
                    .global_load = &global_load},
                   {.d_logits = {},
                    .d_x = tensor_view(wide_TH_.data(), {num_tokens, hidden_dim_}),
                    .d_router_weight = tensor_view(shared_.gradients(parameters_.router_weight),
                                                   {num_experts_, hidden_dim_}),
                    .d_x_write = GradWrite::accumulate,
                    .d_router_weight_write = GradWrite::accumulate});

  add_rms_norm_gradients(num_tokens, hidden_dim_, x_TH_.data(), shared_.values(parameters_.norm),
                         inverse_rms_T_.data(), wide_TH_.data(), dx_TH,
                         shared_.gradients(parameters_.norm));
}

void MoeBlock::update_selection_bias(const RouterLoad& global_load, double rate) {
  megamoe::update_selection_bias(global_load, static_cast<float>(rate),
                                 tensor_view(selection_bias_E_.data(), {num_experts_}));
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

ConstTensorView MoeBlock::router_weight() {
  return tensor_view(shared_.values(parameters_.router_weight), {num_experts_, hidden_dim_});
}

}  // namespace megamoe::trainer
