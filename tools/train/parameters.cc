#include "train/parameters.h"

namespace megamoe::trainer {

ParameterSlice ParameterGroup::add(std::string name, std::int64_t count, WeightDecay weight_decay) {
  slices_.push_back({std::move(name), count_, static_cast<std::size_t>(count), weight_decay});
  count_ += static_cast<std::size_t>(count);
  return slices_.back();
}

void ParameterGroup::allocate(TrainBackend& backend) {
  const auto count = static_cast<std::int64_t>(count_);
  for (Buffer<float>* buffer : {&values_, &gradients_, &first_moments_, &second_moments_}) {
    *buffer = Buffer<float>(backend, count);
  }
  rounded_ = Buffer<bf16>(backend, count);
}

void ParameterGroup::round_values(Operations& operations) {
  operations.round_to_bf16(static_cast<std::int64_t>(count_), values_.data(), rounded_.data());
}

}  // namespace megamoe::trainer
