// A block's router on a GPU: cuBLAS for the products with its weight, CudaRouter between them.
#pragma once

#include "megamoe/cuda_router.h"
#include "train/backend.h"

namespace megamoe::trainer::cuda {

class CudaBlockRouter final : public BlockRouter {
 public:
  /// The backend must outlive it.
  CudaBlockRouter(const BlockRouterShape& shape, TrainBackend& backend);

  void forward(std::span<const Share> shards, const Input& input, const Routing& routing,
               double* load) override;
  void backward(std::span<const Share> shards, const Input& input, const float* d_weights_TK,
                const RouterLoad& global_load, const Gradients& gradients) override;
  [[nodiscard]] double aux_loss(const RouterLoad& global_load) const override;
  void update_selection_bias(const RouterLoad& global_load, float rate) override;
  [[nodiscard]] float* selection_bias() override { return selection_bias_E_.data(); }
  void check() override;

 private:
  ConstTensorView upload(const RouterLoad& global_load);

  std::int64_t hidden_dim_;
  std::int64_t num_experts_;
  std::int64_t top_k_;
  TrainBackend& backend_;
  CudaRouter router_;
  Router host_router_;  ///< for the value of the auxiliary loss, whose load is on the host
  Buffer<float> wide_x_TH_;
  Buffer<float> logits_TE_;
  Buffer<std::int32_t> expert_ids_TK_;  ///< of the last forward
  Buffer<float> d_logits_TE_;
  Buffer<double> global_load_;
  Buffer<float> selection_bias_E_;
};

}  // namespace megamoe::trainer::cuda
