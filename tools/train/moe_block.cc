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

std::int64_t num_tokens_of(std::span<const Share> shards) {
  return shards.empty() ? 0 : shards.back().first + shards.back().count;
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
      router_contexts_(kNumShards),
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

void MoeBlock::forward(std::span<const Share> shards, float* x_TH) {
  const std::int64_t num_tokens = num_tokens_of(shards);
  const std::int64_t num_elements = num_tokens * hidden_dim_;
  std::copy_n(x_TH, num_elements, x_TH_.data());
  rms_norm(num_tokens, hidden_dim_, x_TH, shared_.values(parameters_.norm), wide_TH_.data(),
           inverse_rms_T_.data());
  round_to_bf16(num_elements, wide_TH_.data(), normed_TH_.data());

  load_.clear();
  for (std::size_t i = 0; i < shards.size(); ++i) route(shards[i], router_contexts_[i]);

  layer_context_ = CallContext();  // gives the memory of the last call back for this one
  layer_context_ =
      layer_.forward({.x = tensor_view(normed_TH_.data(), {num_tokens, hidden_dim_}),
                      .expert_ids = tensor_view(expert_ids_TK_.data(), {num_tokens, top_k_}),
                      .weights = tensor_view(weights_TK_.data(), {num_tokens, top_k_}),
                      .experts = expert_weights()},
                     {.y = tensor_view(y_TH_.data(), {num_tokens, hidden_dim_})});
  for (std::int64_t i = 0; i < num_elements; ++i) x_TH[i] += to_float(y_TH_[i]);
}

void MoeBlock::route(const Share& shard, RouterContext& context) {
  router_.forward(
      {.x = tensor_view(normed_TH_.data() + shard.first * hidden_dim_, {shard.count, hidden_dim_}),
       .router_weight = router_weight(),
       .logits = {},
       .selection_bias = tensor_view(selection_bias_E_.data(), {num_experts_}),
       .forced_ids = {}},
      {.expert_ids =
           tensor_view(expert_ids_TK_.data() + shard.first * top_k_, {shard.count, top_k_}),
       .weights = tensor_view(weights_TK_.data() + shard.first * top_k_, {shard.count, top_k_})},
      context);
  router_.add_load(context, load_);
}

// The gradient reaches the normed x on two ways, through the experts and through the router; both
// are summed in fp32 before the norm. x itself also passes the block unchanged: dx is added to.
void MoeBlock::backward(std::span<const Share> shards, float* dx_TH, const RouterLoad& global_load,
                        GradientShards& gradients) {
  const std::int64_t num_tokens = num_tokens_of(shards);
  const std::int64_t num_elements = num_tokens * hidden_dim_;
  round_to_bf16(num_elements, dx_TH, dy_TH_.data());
  layer_.backward(layer_context_,
                  {.x = tensor_view(normed_TH_.data(), {num_tokens, hidden_dim_}),
                   .dy = tensor_view(dy_TH_.data(), {num_tokens, hidden_dim_}),
                   .experts = expert_weights()},
                  {.dx = tensor_view(d_normed_TH_.data(), {num_tokens, hidden_dim_}),
                   .dweights = tensor_view(d_weights_TK_.data(), {num_tokens, top_k_}),
                   .experts = expert_gradients()});
  for (std::int64_t i = 0; i < num_elements; ++i) wide_TH_[i] = to_float(d_normed_TH_[i]);

  for (std::size_t i = 0; i < shards.size(); ++i) {
    const std::int64_t first = shards[i].first * hidden_dim_;
    route_backward(i, shards[i], global_load, gradients);
    add_rms_norm_gradients(shards[i].count, hidden_dim_, x_TH_.data() + first,
                           shared_.values(parameters_.norm),
                           inverse_rms_T_.data() + shards[i].first, wide_TH_.data() + first,
                           dx_TH + first, gradients.of(i, parameters_.norm));
  }
}

void MoeBlock::route_backward(std::int64_t shard_index, const Share& shard,
                              const RouterLoad& global_load, GradientShards& gradients) {
  const std::int64_t first = shard.first * hidden_dim_;
  router_.backward(
      router_contexts_[shard_index],
      {.d_weights = tensor_view(d_weights_TK_.data() + shard.first * top_k_, {shard.count, top_k_}),
       .x = tensor_view(normed_TH_.data() + first, {shard.count, hidden_dim_}),
       .router_weight = router_weight(),
       .global_load = &global_load},
      {.d_logits = {},
       .d_x = tensor_view(wide_TH_.data() + first, {shard.count, hidden_dim_}),
       .d_router_weight = tensor_view(gradients.of(shard_index, parameters_.router_weight),
                                      {num_experts_, hidden_dim_}),
       .d_x_write = GradWrite::accumulate,
       .d_router_weight_write = GradWrite::accumulate});
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
