// Text from a model, a byte at a time.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "train/model.h"

namespace megamoe::trainer {

/// Index of a byte drawn with probability proportional to exp(logit / temperature), given a number
/// in (0, 1); the likeliest byte (the lowest of equals) when the temperature is 0.
std::uint8_t choose_byte(std::span<const float> logits, double temperature, double uniform);

/// Continues `prompt`, whose length is the model's context. Collective: rank 0 has the token, the
/// others lend their experts. Returns the text on rank 0 and nothing elsewhere.
std::string generate(Model& model, std::span<const std::uint8_t> prompt, std::int64_t num_bytes,
                     double temperature, std::uint64_t seed);

}  // namespace megamoe::trainer
