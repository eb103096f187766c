#include "train/model.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "train/counter_rng.h"
#include "train/dense_ops.h"
#include "train/sharding.h"

namespace megamoe::trainer {
namespace {

LayerConfig layer_config(const TrainOptions& options, int num_ranks) {
  LayerConfig config;
  config.shape.max_tokens = max_items_of_rank(options.batch, num_ranks);
  config.shape.hidden_dim = options.model.hidden_dim;
  config.shape.intermediate_dim = options.model.intermediate_dim;
  config.shape.num_experts = options.model.num_experts;
  config.shape.top_k = options.model.top_k;
  config.activation.kind = ActivationKind::swiglu;
  config.memory_mode = options.memory_mode;
  config.overlap = options.overlap;
  config.backend = options.backend;
  config.num_threads = options.num_threads;
  // The optimizer has fp32 master weights, so it takes fp32 gradients.
  config.weight_gradient_mode = WeightGradientMode::store_fp32;
  // A model at its start may route every token to the experts of one rank. Training must not end
  // there, so the capacity is the worst case; the model is small enough.
  const std::int64_t experts_per_rank = options.model.num_experts / num_ranks;
  config.row_capacity = num_ranks * config.shape.max_tokens *
                        std::min<std::int64_t>(options.model.top_k, experts_per_rank);
  return config;
}

/// Normal values with the given deviation. Element i of the tensor's part that begins at `first`
/// draws number first + i, so that a rank with some of the experts gets what a rank with all gets.
void fill_normal(std::span<float> values, const CounterRng& rng, std::uint64_t first,
                 double deviation) {
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<float>(deviation * rng.normal(first + i));
  }
}

}  // namespace

Model::Model(const TrainOptions& options, TrainBackend& backend)
    : backend_(backend),
      context_(options.model.context),
      hidden_dim_(options.model.hidden_dim),
      max_tokens_(max_items_of_rank(options.batch, backend.group().size())),
      workspace_(layer_config(options, backend.group().size()), backend.group()) {
  embedding_ = shared_.add("embedding", kVocabulary * hidden_dim_, WeightDecay::applies);
  position_ = shared_.add("position", context_ * hidden_dim_, WeightDecay::applies);
  const LayerConfig config = layer_config(options, backend.group().size());
  blocks_.reserve(options.model.num_layers);
  std::int64_t num_sums = kNumShards;
  for (std::int64_t layer = 0; layer < options.model.num_layers; ++layer) {
    blocks_.emplace_back("block" + std::to_string(layer), options.model, config, backend,
                         workspace_, shared_, experts_);
    global_loads_.emplace_back(options.model.num_experts);
    num_sums += static_cast<std::int64_t>(global_loads_.back().values().size());
  }
  final_norm_ = shared_.add("final_norm", hidden_dim_, WeightDecay::none);
  shared_.allocate(backend);
  experts_.allocate(backend);

  gradient_shards_ = std::make_unique<GradientShards>(backend, shared_.count());
  shards_.reserve(kNumShards);
  contexts_Tn_ = Buffer<std::uint8_t>(backend, max_tokens_ * context_);
  targets_T_ = Buffer<std::uint8_t>(backend, max_tokens_);
  for (Buffer<float>* buffer : {&x_TH_, &normed_TH_, &d_normed_TH_, &dx_TH_}) {
    *buffer = Buffer<float>(backend, max_tokens_ * hidden_dim_);
  }
  inverse_rms_T_ = Buffer<float>(backend, max_tokens_);
  logits_TV_ = Buffer<float>(backend, max_tokens_ * kVocabulary);
  sums_ = Buffer<double>(backend, num_sums);
  host_sums_.resize(num_sums);
  initialize(options.seed);
}

void Model::initialize(std::uint64_t seed) {
  std::uint64_t tensor_index = 0;
  std::vector<float> values;
  const auto upload = [&](ParameterGroup& group, const ParameterSlice& slice) {
    backend_.upload(group.values(slice), values.data(), values.size() * sizeof(float));
  };
  const auto fill = [&](ParameterGroup& group, const ParameterSlice& slice, double deviation,
                        std::uint64_t first) {
    const CounterRng rng(seed, RandomStream::parameters, tensor_index++);
    values.resize(slice.count);
    fill_normal(values, rng, first, deviation);
    upload(group, slice);
  };
  const auto ones = [&](const ParameterSlice& slice) {
    values.assign(slice.count, 1.0F);
    upload(shared_, slice);
  };
  const double by_hidden = 1.0 / std::sqrt(static_cast<double>(hidden_dim_));
  fill(shared_, embedding_, by_hidden, 0);
  fill(shared_, position_, 1.0 / std::sqrt(static_cast<double>(context_)), 0);
  for (MoeBlock& block : blocks_) {
    const MoeBlock::Parameters& parameters = block.parameters();
    const std::uint64_t first = parameters.gate.count * backend_.group().rank();
    // What the blocks add to x should not grow with their number.
    const double by_intermediate =
        1.0 / std::sqrt(2.0 * static_cast<double>(block.intermediate_dim() * blocks_.size()));
    ones(parameters.norm);
    fill(shared_, parameters.router_weight, by_hidden, 0);
    fill(experts_, parameters.gate, by_hidden, first);
    fill(experts_, parameters.up, by_hidden, first);
    fill(experts_, parameters.down, by_intermediate, first);
  }
  ones(final_norm_);
  parameters_changed();
}

void Model::forward(std::int64_t batch, std::span<const std::uint8_t> contexts_Tn) {
  Operations& operations = backend_.operations();
  const int rank = backend_.group().rank();
  const int num_ranks = backend_.group().size();
  batch_ = batch;
  num_tokens_ = items_of_rank(batch, rank, num_ranks).count;
  shards_.clear();
  for (std::int64_t i = 0; i < shards_of_rank(rank, num_ranks).count; ++i) {
    shards_.push_back(local_shard(batch, rank, num_ranks, i));
  }
  backend_.upload(contexts_Tn_.data(), contexts_Tn.data(), contexts_Tn.size());

  const float* embedding = shared_.values(embedding_);
  operations.embed({num_tokens_, context_, hidden_dim_}, contexts_Tn_.data(), embedding,
                   shared_.values(position_), x_TH_.data());
  double* load = sums_.data() + kNumShards;
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    blocks_[i].forward(shards_, x_TH_.data(), load);
    load += global_loads_[i].values().size();
  }
  operations.rms_norm(num_tokens_, hidden_dim_, x_TH_.data(), shared_.values(final_norm_),
                      normed_TH_.data(), inverse_rms_T_.data());
  operations.multiply_by_transposed(shards_, {kVocabulary, hidden_dim_}, normed_TH_.data(),
                                    embedding, logits_TV_.data());
  check();
}

void Model::check() {
  for (MoeBlock& block : blocks_) block.check();
}

std::span<const float> Model::logits() {
  host_logits_.resize(num_tokens_ * kVocabulary);
  backend_.download(host_logits_.data(), logits_TV_.data(), host_logits_.size() * sizeof(float));
  return host_logits_;
}

double Model::loss(std::span<const std::uint8_t> targets_T) {
  backend_.upload(targets_T_.data(), targets_T.data(), targets_T.size());
  const Share mine = shards_of_rank(backend_.group().rank(), backend_.group().size());
  backend_.operations().cross_entropy(shards_, targets_T_.data(), logits_TV_.data(),
                                      sums_.data() + mine.first);
  return sum_over_ranks_and_shards() / static_cast<double>(batch_);
}

double Model::loss_for_backward(std::span<const std::uint8_t> targets_T) {
  backend_.upload(targets_T_.data(), targets_T.data(), targets_T.size());
  const Share mine = shards_of_rank(backend_.group().rank(), backend_.group().size());
  backend_.operations().cross_entropy_gradient(shards_, targets_T_.data(),
                                               1.0F / static_cast<float>(batch_), logits_TV_.data(),
                                               sums_.data() + mine.first);
  return sum_over_ranks_and_shards() / static_cast<double>(batch_);
}

/// One collective sums all that is counted over tokens.
double Model::sum_over_ranks_and_shards() {
  backend_.download(host_sums_.data(), sums_.data(), host_sums_.size() * sizeof(double));
  sum_over_ranks(backend_.host_group(), host_sums_, sums_scratch_,
                 "the loss and the experts' load");
  auto next = host_sums_.begin() + kNumShards;
  for (RouterLoad& load : global_loads_) {
    std::copy_n(next, load.values().size(), load.values().begin());
    next += static_cast<std::ptrdiff_t>(load.values().size());
  }
  return std::accumulate(host_sums_.begin(), host_sums_.begin() + kNumShards, 0.0);
}

double Model::aux_loss() const {
  double total = 0;
  for (std::size_t i = 0; i < blocks_.size(); ++i) total += blocks_[i].aux_loss(global_loads_[i]);
  return total;
}

double Model::load_max_over_mean() const {
  double worst = 0;
  for (const RouterLoad& load : global_loads_) worst = std::max(worst, load.max_over_mean());
  return worst;
}

void Model::backward() {
  Operations& operations = backend_.operations();
  GradientShards& gradients = *gradient_shards_;
  gradients.clear();
  operations.zero(d_normed_TH_.data(), num_tokens_ * hidden_dim_ * sizeof(float));
  operations.zero(dx_TH_.data(), num_tokens_ * hidden_dim_ * sizeof(float));
  head_backward();
  for (std::size_t i = blocks_.size(); i-- > 0;) {
    blocks_[i].backward(shards_, dx_TH_.data(), global_loads_[i], gradients);
  }
  for (std::size_t i = 0; i < shards_.size(); ++i) {
    const Share& shard = shards_[i];
    operations.add_embed_gradients({shard.count, context_, hidden_dim_},
                                   contexts_Tn_.data() + shard.first * context_,
                                   shared_.values(embedding_), shared_.values(position_),
                                   dx_TH_.data() + shard.first * hidden_dim_,
                                   gradients.of(i, embedding_), gradients.of(i, position_));
  }
  check();
  gradients.sum(shared_.gradients());
}

/// From the gradient of the logits, in logits_TV_, to that of the last block's output, in dx_TH_.
void Model::head_backward() {
  Operations& operations = backend_.operations();
  GradientShards& gradients = *gradient_shards_;
  operations.add_product(shards_, {hidden_dim_, kVocabulary}, logits_TV_.data(),
                         shared_.values(embedding_), d_normed_TH_.data());
  for (std::size_t i = 0; i < shards_.size(); ++i) {
    const Share& shard = shards_[i];
    const std::int64_t first = shard.first * hidden_dim_;
    operations.add_product_over_tokens(shard.count, kVocabulary, hidden_dim_,
                                       logits_TV_.data() + shard.first * kVocabulary,
                                       normed_TH_.data() + first, gradients.of(i, embedding_));
    operations.add_rms_norm_gradients(
        shard.count, hidden_dim_, x_TH_.data() + first, shared_.values(final_norm_),
        inverse_rms_T_.data() + shard.first, d_normed_TH_.data() + first, dx_TH_.data() + first,
        gradients.of(i, final_norm_));
  }
}

void Model::update_selection_biases(double rate) {
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    blocks_[i].update_selection_bias(global_loads_[i], rate);
  }
}

}  // namespace megamoe::trainer
