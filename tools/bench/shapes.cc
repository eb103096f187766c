#include "bench/shapes.h"

#include <charconv>
#include <stdexcept>

namespace megamoe::bench {
namespace {

MoeShape layer_shape(std::int64_t hidden_dim, std::int64_t intermediate_dim,
                     std::int32_t num_experts, std::int32_t top_k) {
  return {.hidden_dim = hidden_dim,
          .intermediate_dim = intermediate_dim,
          .num_experts = num_experts,
          .top_k = top_k};
}

[[noreturn]] void refuse(const std::string& text, const std::string& why) {
  throw std::invalid_argument("'" + text + "': " + why);
}

std::int32_t parse_divisor(const std::string& text, const std::string& digits) {
  std::int32_t divisor = 0;
  const char* end = digits.data() + digits.size();
  const auto result = std::from_chars(digits.data(), end, divisor);
  if (result.ec != std::errc{} || result.ptr != end || divisor < 1) {
    refuse(text, "must end in /NUMBER");
  }
  return divisor;
}

}  // namespace

const std::vector<NamedShape>& model_shapes() {
  static const std::vector<NamedShape> shapes = {
      {"qwen3-30b", layer_shape(2048, 768, 128, 8)},
      {"qwen3-235b", layer_shape(4096, 1536, 128, 8)},
      {"deepseek-v3", layer_shape(7168, 2048, 256, 8)},
      {"mixtral-8x7b", layer_shape(4096, 14336, 8, 2)},
      {"qwen2-57b", layer_shape(3584, 2560, 64, 8)},
      {"qwen1.5-moe", layer_shape(2048, 1408, 60, 4)},
  };
  return shapes;
}

NamedShape parse_shape(const std::string& text) {
  const auto slash = text.find('/');
  const std::string model = text.substr(0, slash);
  for (const NamedShape& candidate : model_shapes()) {
    if (candidate.name != model) continue;
    NamedShape result{text, candidate.shape};
    if (slash == std::string::npos) return result;
    const std::int32_t divisor = parse_divisor(text, text.substr(slash + 1));
    MoeShape& shape = result.shape;
    if (shape.hidden_dim % divisor != 0 || shape.intermediate_dim % divisor != 0 ||
        shape.num_experts % divisor != 0 || shape.num_experts / divisor < shape.top_k) {
      refuse(text, "hidden, intermediate and experts of the model cannot all be divided by " +
                       std::to_string(divisor));
    }
    shape.hidden_dim /= divisor;
    shape.intermediate_dim /= divisor;
    shape.num_experts /= divisor;
    return result;
  }
  std::string known;
  for (const NamedShape& candidate : model_shapes()) known.append(candidate.name).append(", ");
  refuse(text, "must be one of " + known + "with /NUMBER for a smaller one");
}

}  // namespace megamoe::bench
