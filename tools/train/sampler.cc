#include "train/sampler.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "train/counter_rng.h"

namespace megamoe::trainer {

std::uint8_t choose_byte(std::span<const float> logits, double temperature, double uniform) {
  const auto highest = std::ranges::max_element(logits);
  const auto likeliest = static_cast<std::uint8_t>(highest - logits.begin());
  if (temperature == 0) return likeliest;
  const auto odds = [&](float logit) {
    return std::exp(static_cast<double>(logit - *highest) / temperature);
  };
  double total = 0;
  for (const float logit : logits) total += odds(logit);
  double left = uniform * total;
  for (std::size_t byte = 0; byte < logits.size(); ++byte) {
    left -= odds(logits[byte]);
    if (left < 0) return static_cast<std::uint8_t>(byte);
  }
  return likeliest;  // rounding left a rest
}

std::string generate(Model& model, std::span<const std::uint8_t> prompt, std::int64_t num_bytes,
                     double temperature, std::uint64_t seed) {
  const CounterRng rng(seed, RandomStream::sampling);
  std::vector<std::uint8_t> context(prompt.begin(), prompt.end());
  std::string text;
  for (std::int64_t i = 0; i < num_bytes; ++i) {
    if (model.backend().host_group().rank() != 0) {
      model.forward(1, {});  // a batch of one sample is rank 0's
      continue;
    }
    model.forward(1, context);
    const std::uint8_t byte = choose_byte(model.logits(), temperature, rng.uniform(i));
    text.push_back(static_cast<char>(byte));
    std::shift_left(context.begin(), context.end(), 1);
    context.back() = byte;
  }
  return text;
}

}  // namespace megamoe::trainer
