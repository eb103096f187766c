#include "train/cpu/cpu_backend.h"

#include <cstring>
#include <vector>

#include "train/cpu/cpu_operations.h"

namespace megamoe::trainer {
namespace {

class CpuBlockRouter final : public BlockRouter {
 public:
  explicit CpuBlockRouter(const BlockRouterShape& shape)
      : hidden_dim_(shape.hidden_dim),
        num_experts_(shape.config.num_experts),
        top_k_(shape.config.top_k),
        router_(shape.config),
        contexts_(kNumShards),
        load_(num_experts_),
        selection_bias_E_(num_experts_) {}

  void forward(std::span<const Share> shards, const Input& input, const Routing& routing,
               double* load) override {
    load_.clear();
    for (std::size_t i = 0; i < shards.size(); ++i) {
      const auto [first, count] = shards[i];
      router_.forward(
          {.x = tensor_view(input.x_TH + first * hidden_dim_, {count, hidden_dim_}),
           .router_weight = tensor_view(input.weight_EH, {num_experts_, hidden_dim_}),
           .logits = {},
           .selection_bias = tensor_view(selection_bias_E_.data(), {num_experts_}),
           .forced_ids = {}},
          {.expert_ids = tensor_view(routing.expert_ids_TK + first * top_k_, {count, top_k_}),
           .weights = tensor_view(routing.weights_TK + first * top_k_, {count, top_k_})},
          contexts_[i]);
      router_.add_load(contexts_[i], load_);
    }
    std::ranges::copy(load_.values(), load);
  }

  void backward(std::span<const Share> shards, const Input& input, const float* d_weights_TK,
                const RouterLoad& global_load, const Gradients& gradients) override {
    for (std::size_t i = 0; i < shards.size(); ++i) {
      const auto [first, count] = shards[i];
      const std::int64_t offset = first * hidden_dim_;
      router_.backward(
          contexts_[i],
          {.d_weights = tensor_view(d_weights_TK + first * top_k_, {count, top_k_}),
           .x = tensor_view(input.x_TH + offset, {count, hidden_dim_}),
           .router_weight = tensor_view(input.weight_EH, {num_experts_, hidden_dim_}),
           .global_load = &global_load},
          {.d_logits = {},
           .d_x = tensor_view(gradients.d_x_TH + offset, {count, hidden_dim_}),
           .d_router_weight = tensor_view(gradients.d_weight_SEH[i], {num_experts_, hidden_dim_}),
           .d_x_write = GradWrite::accumulate,
           .d_router_weight_write = GradWrite::accumulate});
    }
  }

  [[nodiscard]] double aux_loss(const RouterLoad& global_load) const override {
    return router_.aux_loss(global_load);
  }
  void update_selection_bias(const RouterLoad& global_load, float rate) override {
    megamoe::update_selection_bias(global_load, rate,
                                   tensor_view(selection_bias_E_.data(), {num_experts_}));
  }
  [[nodiscard]] float* selection_bias() override { return selection_bias_E_.data(); }
  void check() override {}

 private:
  std::int64_t hidden_dim_;
  std::int64_t num_experts_;
  std::int64_t top_k_;
  Router router_;
  std::vector<RouterContext> contexts_;  // a shard
  RouterLoad load_;
  std::vector<float> selection_bias_E_;
};

class CpuBackend final : public TrainBackend {
 public:
  explicit CpuBackend(Communicator& group) : group_(group) {}

  [[nodiscard]] Communicator& host_group() override { return group_; }
  [[nodiscard]] Communicator& group() override { return group_; }
  [[nodiscard]] Stream stream() override { return {}; }
  [[nodiscard]] Operations& operations() override { return operations_; }
  std::unique_ptr<BlockRouter> make_router(const BlockRouterShape& shape) override {
    return std::make_unique<CpuBlockRouter>(shape);
  }
  std::shared_ptr<std::byte> allocate(std::size_t bytes) override {
    return {new std::byte[bytes](), std::default_delete<std::byte[]>()};
  }
  void upload(void* to, const void* host, std::size_t bytes) override {
    if (bytes > 0) std::memcpy(to, host, bytes);  // nothing may lie nowhere
  }
  void download(void* host, const void* from, std::size_t bytes) override {
    if (bytes > 0) std::memcpy(host, from, bytes);
  }
  void wait() override {}

 private:
  Communicator& group_;
  CpuOperations operations_;
};

}  // namespace

std::unique_ptr<TrainBackend> make_cpu_backend(Communicator& host_group) {
  return std::make_unique<CpuBackend>(host_group);
}

}  // namespace megamoe::trainer
