#include "train/parameters.h"

namespace megamoe::trainer {

ParameterSlice ParameterGroup::add(std::string name, std::int64_t count, WeightDecay weight_decay) {
  slices_.push_back(
      {std::move(name), values_.size(), static_cast<std::size_t>(count), weight_decay});
  const std::size_t total = values_.size() + static_cast<std::size_t>(count);
  for (std::vector<float>* buffer : {&values_, &gradients_, &first_moments_, &second_moments_}) {
    buffer->resize(total);
  }
  rounded_.resize(total);
  return slices_.back();
}

void ParameterGroup::round_values() {
  for (std::size_t i = 0; i < values_.size(); ++i) rounded_[i] = to_bf16(values_[i]);
}

}  // namespace megamoe::trainer
