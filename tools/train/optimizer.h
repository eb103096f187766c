// AdamW with decoupled weight decay (Loshchilov, Hutter, arXiv:1711.05101), linear warmup, cosine
// decay, and clipping by the norm of the gradient of all parameters of all ranks.
#pragma once

#include <cstdint>
#include <vector>

#include "train/backend.h"
#include "train/options.h"
#include "train/parameters.h"

namespace megamoe::trainer {

/// The learning rate of step 1, 2, ...: rises linearly over the warmup, then falls as a cosine to a
/// tenth at decay_steps, and stays there.
double learning_rate(const OptimizerOptions& options, std::int64_t step);

/// L2 norm of all gradients: the shared ones, which are equal on every rank, once, and those of the
/// experts of every rank. Collective; the same bits on every rank and for every number of ranks.
class GradientNorm {
 public:
  /// The backend must outlive it.
  GradientNorm(std::int64_t num_experts, TrainBackend& backend);
  double operator()(ParameterGroup& shared, ParameterGroup& experts);

 private:
  TrainBackend& backend_;
  std::vector<EqualParts> arrays_;         // shared, then tensor by tensor of the experts
  std::vector<double> part_sums_;          // of those arrays
  std::vector<double> local_square_sums_;  // of this rank's experts
  std::vector<double> square_sums_E_;
};

/// What gradients are multiplied by so that their norm is at most `clip_norm`.
double clip_factor(double norm, double clip_norm);

/// Takes step 1, 2, ... of a group, with its gradients times `gradient_scale`:
///   m = beta1 m + (1 - beta1) g,  v = beta2 v + (1 - beta2) g^2,
///   value -= rate * (m / (1 - beta1^step) / (sqrt(v / (1 - beta2^step)) + epsilon)
///                    + weight_decay * value).
void adamw_step(Operations& operations, ParameterGroup& group, const OptimizerOptions& options,
                std::int64_t step, double gradient_scale);

}  // namespace megamoe::trainer
