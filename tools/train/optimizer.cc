#include "train/optimizer.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <numeric>

#include "train/sharding.h"

namespace megamoe::trainer {
namespace {

constexpr double kLowestRate = 0.1;  // of the highest

/// Eight interleaved sums, so that the additions need not wait for each other.
double square_sum(std::span<const float> values) {
  constexpr std::size_t kWays = 8;
  double sums[kWays] = {};
  for (std::size_t i = 0; i < values.size(); ++i) {
    sums[i % kWays] += static_cast<double>(values[i]) * static_cast<double>(values[i]);
  }
  double total = 0;
  for (const double sum : sums) total += sum;
  return total;
}

/// The step's factors, in the precision of the parameters.
struct StepFactors {
  float beta1;
  float beta2;
  float gradient_scale;
  float rate;          // over the bias correction of the first moment
  float v_correction;  // of the second moment
  float epsilon;
};

void step_values(std::size_t count, const StepFactors& factors, float decay_factor,
                 const float* gradients, float* values, float* first, float* second) {
  for (std::size_t i = 0; i < count; ++i) {
    const float gradient = gradients[i] * factors.gradient_scale;
    first[i] = factors.beta1 * first[i] + (1.0F - factors.beta1) * gradient;
    second[i] = factors.beta2 * second[i] + (1.0F - factors.beta2) * gradient * gradient;
    const float denominator = std::sqrt(second[i] * factors.v_correction) + factors.epsilon;
    values[i] = values[i] * decay_factor - factors.rate * first[i] / denominator;
  }
}

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

GradientNorm::GradientNorm(std::int64_t num_experts, Communicator& communicator)
    : communicator_(communicator),
      local_square_sums_(num_experts / communicator.size()),
      square_sums_E_(num_experts) {}

double GradientNorm::operator()(ParameterGroup& shared, ParameterGroup& experts) {
  // An expert's sum is the same whichever rank has it, and the experts' sums are added in order.
  for (std::size_t expert = 0; expert < local_square_sums_.size(); ++expert) {
    local_square_sums_[expert] = 0;
    for (const ParameterSlice& slice : experts.slices()) {  // [e, ...]
      const std::size_t count = slice.count / local_square_sums_.size();
      local_square_sums_[expert] +=
          square_sum(experts.gradients().subspan(slice.offset + count * expert, count));
    }
  }
  communicator_.all_gather(local_square_sums_.data(), square_sums_E_.data(),
                           local_square_sums_.size() * sizeof(double), "the gradient's norm",
                           kDeadlineS);
  return std::sqrt(std::accumulate(square_sums_E_.begin(), square_sums_E_.end(),
                                   square_sum(shared.gradients())));
}

double clip_factor(double norm, double clip_norm) {
  return norm > clip_norm ? clip_norm / norm : 1.0;
}

void adamw_step(ParameterGroup& group, const OptimizerOptions& options, std::int64_t step,
                double gradient_scale) {
  const double rate = learning_rate(options, step);
  const auto exponent = static_cast<double>(step);
  const StepFactors factors = {
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
    step_values(slice.count, factors, decay_factor, group.gradients(slice), group.values(slice),
                &group.first_moments()[slice.offset], &group.second_moments()[slice.offset]);
  }
}

}  // namespace megamoe::trainer
