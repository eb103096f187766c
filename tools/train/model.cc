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

Model::Model(const TrainOptions& options, Communicator& communicator)
    : communicator_(communicator),
      context_(options.model.context),
      hidden_dim_(options.model.hidden_dim),
      max_tokens_(max_items_of_rank(options.batch, communicator.size())),
      workspace_(layer_config(options, communicator.size()), communicator) {
  embedding_ = shared_.add("embedding", kVocabulary * hidden_dim_, WeightDecay::applies);
  position_ = shared_.add("position", context_ * hidden_dim_, WeightDecay::applies);
  const LayerConfig config = layer_config(options, communicator.size());
  blocks_.reserve(options.model.num_layers);
  for (std::int64_t layer = 0; layer < options.model.num_layers; ++layer) {
    blocks_.emplace_back("block" + std::to_string(layer), options.model, config, communicator,
                         workspace_, shared_, experts_);
    global_loads_.emplace_back(options.model.num_experts);
  }
  final_norm_ = shared_.add("final_norm", hidden_dim_, WeightDecay::none);

  gradient_shards_ = std::make_unique<GradientShards>(communicator, shared_.count());
  shards_.reserve(kNumShards);
  contexts_Tn_.resize(max_tokens_ * context_);
  for (std::vector<float>* buffer : {&x_TH_, &normed_TH_, &d_normed_TH_, &dx_TH_}) {
    buffer->resize(max_tokens_ * hidden_dim_);
  }
  inverse_rms_T_.resize(max_tokens_);
  logits_TV_.resize(max_tokens_ * kVocabulary);
  transposed_.resize(kVocabulary * std::max(max_tokens_, hidden_dim_));
  initialize(options.seed);
}

void Model::initialize(std::uint64_t seed) {
  std::uint64_t tensor_index = 0;
  const auto fill = [&](ParameterGroup& group, const ParameterSlice& slice, double deviation,
                        std::uint64_t first) {
    const CounterRng rng(seed, RandomStream::parameters, tensor_index++);
    fill_normal(group.values().subspan(slice.offset, slice.count), rng, first, deviation);
  };
  const auto ones = [&](const ParameterSlice& slice) {
    std::ranges::fill(shared_.values().subspan(slice.offset, slice.count), 1.0F);
  };
  const double by_hidden = 1.0 / std::sqrt(static_cast<double>(hidden_dim_));
  fill(shared_, embedding_, by_hidden, 0);
  fill(shared_, position_, 1.0 / std::sqrt(static_cast<double>(context_)), 0);
  for (MoeBlock& block : blocks_) {
    const MoeBlock::Parameters& parameters = block.parameters();
    const std::uint64_t first = parameters.gate.count * communicator_.rank();
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
  const int rank = communicator_.rank();
  const int num_ranks = communicator_.size();
  batch_ = batch;
  num_tokens_ = items_of_rank(batch, rank, num_ranks).count;
  shards_.clear();
  for (std::int64_t i = 0; i < shards_of_rank(rank, num_ranks).count; ++i) {
    shards_.push_back(local_shard(batch, rank, num_ranks, i));
  }
  std::ranges::copy(contexts_Tn, contexts_Tn_.begin());

  const float* embedding = shared_.values(embedding_);
  embed({num_tokens_, context_, hidden_dim_}, contexts_Tn.data(), embedding,
        shared_.values(position_), x_TH_.data());
  for (MoeBlock& block : blocks_) block.forward(shards_, x_TH_.data());
  rms_norm(num_tokens_, hidden_dim_, x_TH_.data(), shared_.values(final_norm_), normed_TH_.data(),
           inverse_rms_T_.data());

  transpose(embedding, transposed_.data(), kVocabulary, hidden_dim_);
  std::fill_n(logits_TV_.begin(), num_tokens_ * kVocabulary, 0.0F);
  add_product(normed_TH_.data(), transposed_.data(), logits_TV_.data(), num_tokens_, kVocabulary,
              hidden_dim_);
}

std::span<const float> Model::logits() const {
  return std::span(logits_TV_).first(num_tokens_ * kVocabulary);
}

double Model::loss(std::span<const std::uint8_t> targets_T) {
  return sum_over_batch([&](const Share& shard) {
           return cross_entropy(shard.count, targets_T.data() + shard.first,
                                logits_TV_.data() + shard.first * kVocabulary);
         }) /
         static_cast<double>(batch_);
}

double Model::loss_for_backward(std::span<const std::uint8_t> targets_T) {
  const float scale = 1.0F / static_cast<float>(batch_);
  return sum_over_batch([&](const Share& shard) {
           return cross_entropy_gradient(shard.count, targets_T.data() + shard.first, scale,
                                         logits_TV_.data() + shard.first * kVocabulary);
         }) /
         static_cast<double>(batch_);
}

/// One collective sums all that is counted over tokens: a place for each shard's loss, which one
/// rank fills, and the blocks' loads.
template <class TokensLoss>
double Model::sum_over_batch(TokensLoss tokens_loss) {
  sums_.assign(kNumShards, 0.0);
  const Share mine = shards_of_rank(communicator_.rank(), communicator_.size());
  for (std::size_t i = 0; i < shards_.size(); ++i) sums_[mine.first + i] = tokens_loss(shards_[i]);
  for (const MoeBlock& block : blocks_) {
    const std::span<const double> values = block.load().values();
    sums_.insert(sums_.end(), values.begin(), values.end());
  }
  sum_over_ranks(communicator_, sums_, sums_scratch_, "the loss and the experts' load");
  auto next = sums_.begin() + kNumShards;
  for (RouterLoad& load : global_loads_) {
    std::copy_n(next, load.values().size(), load.values().begin());
    next += static_cast<std::ptrdiff_t>(load.values().size());
  }
  return std::accumulate(sums_.begin(), sums_.begin() + kNumShards, 0.0);
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
  GradientShards& gradients = *gradient_shards_;
  gradients.clear();
  std::fill_n(d_normed_TH_.begin(), num_tokens_ * hidden_dim_, 0.0F);
  std::fill_n(dx_TH_.begin(), num_tokens_ * hidden_dim_, 0.0F);
  head_backward();
  for (std::size_t i = blocks_.size(); i-- > 0;) {
    blocks_[i].backward(shards_, dx_TH_.data(), global_loads_[i], gradients);
  }
  for (std::size_t i = 0; i < shards_.size(); ++i) {
    const Share& shard = shards_[i];
    add_embed_gradients({shard.count, context_, hidden_dim_},
                        contexts_Tn_.data() + shard.first * context_, shared_.values(embedding_),
                        shared_.values(position_), dx_TH_.data() + shard.first * hidden_dim_,
                        gradients.of(i, embedding_), gradients.of(i, position_));
  }
  gradients.sum(shared_.gradients());
}

/// From the gradient of the logits, in logits_TV_, to that of the last block's output, in dx_TH_.
void Model::head_backward() {
  GradientShards& gradients = *gradient_shards_;
  add_product(logits_TV_.data(), shared_.values(embedding_), d_normed_TH_.data(), num_tokens_,
              hidden_dim_, kVocabulary);
  for (std::size_t i = 0; i < shards_.size(); ++i) {
    const Share& shard = shards_[i];
    const std::int64_t first = shard.first * hidden_dim_;
    transpose(logits_TV_.data() + shard.first * kVocabulary, transposed_.data(), shard.count,
              kVocabulary);
    add_product(transposed_.data(), normed_TH_.data() + first, gradients.of(i, embedding_),
                kVocabulary, hidden_dim_, shard.count);
    add_rms_norm_gradients(shard.count, hidden_dim_, x_TH_.data() + first,
                           shared_.values(final_norm_), inverse_rms_T_.data() + shard.first,
                           d_normed_TH_.data() + first, dx_TH_.data() + first,
                           gradients.of(i, final_norm_));
  }
}

void Model::update_selection_biases(double rate) {
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    blocks_[i].update_selection_bias(global_loads_[i], rate);
  }
}

}  // namespace megamoe::trainer
