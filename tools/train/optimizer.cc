#include "train/optimizer.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <numeric>

#include "train/sharding.h"

namespace megamoe::trainer {
namespace {

constexpr double kLowestRate = 0.1;  // of the highest

}  // namespace

double learning_rate(const OptimizerOptions& options, std::int64_t step) {
  if (step <= options.warmup_steps) {
    return options.learning_rate * static_cast<double>(step) /
           static_cast<double>(options.warmup_steps);
  }
  if (step >= options.decay_steps) return options.learning_rate * kLowestRate;
  const double progress = static_cast<double>(step - options.warmup_steps) /
                          static_cast<double>(options.decay_steps - options.warmup_steps);
  const double cosine = 0.5 * (1.0 + std::cos(std::numbers::pi * progress));
  return options.learning_rate * (kLowestRate + (1.0 - kLowestRate) * cosine);
}

GradientNorm::GradientNorm(std::int64_t num_experts, TrainBackend& backend)
    : backend_(backend),
      local_square_sums_(num_experts / backend.host_group().size()),
      square_sums_E_(num_experts) {}

double GradientNorm::operator()(ParameterGroup& shared, ParameterGroup& experts) {
  const auto num_local = static_cast<std::int64_t>(local_square_sums_.size());
  arrays_.assign(1, {shared.gradients().data(), static_cast<std::int64_t>(shared.count()), 1});
  for (const ParameterSlice& slice : experts.slices()) {  // [e, ...]
    arrays_.push_back(
        {experts.gradients(slice), static_cast<std::int64_t>(slice.count) / num_local, num_local});
  }
  part_sums_.resize(1 + experts.slices().size() * local_square_sums_.size());
  backend_.operations().square_sums(arrays_, part_sums_);
  // An expert's sum is the same whichever rank has it, and the experts' sums are added in order.
  std::ranges::fill(local_square_sums_, 0.0);
  for (std::size_t i = 1; i < part_sums_.size(); ++i) {
    local_square_sums_[(i - 1) % local_square_sums_.size()] += part_sums_[i];
  }
  backend_.host_group().all_gather(local_square_sums_.data(), square_sums_E_.data(),
                                   local_square_sums_.size() * sizeof(double),
                                   "the gradient's norm", kDeadlineS);
  return std::sqrt(std::accumulate(square_sums_E_.begin(), square_sums_E_.end(), part_sums_[0]));
}

double clip_factor(double norm, double clip_norm) {
  return norm > clip_norm ? clip_norm / norm : 1.0;
}

void adamw_step(Operations& operations, ParameterGroup& group, const OptimizerOptions& options,
                std::int64_t step, double gradient_scale) {
  const double rate = learning_rate(options, step);
  const auto exponent = static_cast<double>(step);
  const AdamWFactors factors = {
      .beta1 = static_cast<float>(options.beta1),
      .beta2 = static_cast<float>(options.beta2),
      .gradient_scale = static_cast<float>(gradient_scale),
      .rate = static_cast<float>(rate / (1.0 - std::pow(options.beta1, exponent))),
      .v_correction = static_cast<float>(1.0 / (1.0 - std::pow(options.beta2, exponent))),
      .epsilon = static_cast<float>(options.epsilon),
  };
  for (const ParameterSlice& slice : group.slices()) {
    const bool decays = slice.weight_decay == WeightDecay::applies;
    const auto decay_factor = static_cast<float>(1.0 - (decays ? rate * options.weight_decay : 0));
    operations.adamw(factors, decay_factor,
                     {.count = static_cast<std::int64_t>(slice.count),
                      .gradients = group.gradients(slice),
                      .values = group.values(slice),
                      .first_moments = group.first_moments().data() + slice.offset,
                      .second_moments = group.second_moments().data() + slice.offset});
  }
}

}  // namespace megamoe::trainer
