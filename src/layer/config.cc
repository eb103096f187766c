#include "megamoe/config.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/longest_wait.h"
#include "comm/gpu_limits.h"
#include "cuda/entry.h"
#include "layer/workspace.h"
#include "megamoe/error.h"

namespace megamoe {
namespace {

void require(bool holds, const char* member, const std::string& why) {
  if (!holds) throw Error(ErrorCode::invalid_argument, std::string(member) + " " + why);
}

void require_range(const char* member, std::int64_t value, std::int64_t low, std::int64_t high) {
  require(value >= low && value <= high, member,
          "is " + std::to_string(value) + ", must be from " + std::to_string(low) + " to " +
              std::to_string(high));
}

/// What the kernels do not take.
void validate_cuda(const LayerConfig& config, int num_ranks) {
  if (!cuda::is_built()) {
    throw Error(ErrorCode::unsupported,
                "backend cuda: this build has none (MEGAMOE_CUDA is off); use the cpu backend");
  }
  check_gpu_limits(workspace_dims(config, num_ranks));
  if (config.num_sms == 1) {
    throw Error(ErrorCode::unsupported, "num_sms is 1; the cuda backend takes 0 or at least 2");
  }
}

/// A number cast to an enumeration need not be one of its values.
template <class Enum>
void require_value(const char* member, Enum value, Enum last) {
  require(value <= last, member,
          "is " + std::to_string(static_cast<int>(value)) + ", which is no value of its type");
}

void require_values(const LayerConfig& config) {
  require_value("activation.kind", config.activation.kind, ActivationKind::identity);
  require_value("memory_mode", config.memory_mode, MemoryMode::recompute);
  require_value("overlap", config.overlap, Overlap::off);
  require_value("weight_gradient_mode", config.weight_gradient_mode,
                WeightGradientMode::accumulate_fp32);
  require_value("backend", config.backend, Backend::cuda);
}

}  // namespace

const char* to_string(ActivationKind kind) {
  switch (kind) {
    case ActivationKind::swiglu:
      return "swiglu";
    case ActivationKind::clamped_swiglu:
      return "clamped_swiglu";
    case ActivationKind::gelu_erf:
      return "gelu_erf";
    case ActivationKind::gelu_tanh:
      return "gelu_tanh";
    case ActivationKind::relu2:
      return "relu2";
    case ActivationKind::identity:
      return "identity";
  }
  return "unknown";
}

std::int64_t resolved_row_capacity(const LayerConfig& config, int num_ranks) {
  if (config.row_capacity != 0) return config.row_capacity;
  // A group that never has a token still has weight gradients, exact zeros, which a GPU computes
  // from row buffers that must not be empty.
  return std::max<std::int64_t>(
      1, std::min(num_ranks, 2) * config.shape.max_tokens * config.shape.top_k);
}

std::int64_t resolved_saved_row_capacity(const LayerConfig& config, int num_ranks) {
  if (config.memory_mode == MemoryMode::recompute) return 0;
  const std::int64_t row_capacity = resolved_row_capacity(config, num_ranks);
  if (config.saved_row_capacity != 0) return std::min(config.saved_row_capacity, row_capacity);
  const std::int64_t slots = config.shape.max_tokens * config.shape.top_k;
  return std::min(row_capacity, slots + (slots + 3) / 4);
}

void validate(const LayerConfig& config, int num_ranks) {
  const MoeShape& shape = config.shape;
  constexpr std::int64_t kMaxInt = std::numeric_limits<std::int32_t>::max();
  require(num_ranks >= 1, "num_ranks", "is " + std::to_string(num_ranks) + ", must be at least 1");
  // Tokens and slots of one rank are counted in 32 bits; rows, elements and bytes in 64.
  require_range("shape.hidden_dim", shape.hidden_dim, 1, 1 << 20);
  require_range("shape.intermediate_dim", shape.intermediate_dim, 1, 1 << 20);
  require_range("shape.num_experts", shape.num_experts, 1, 1 << 20);
  require_range("shape.top_k", shape.top_k, 1, 1 << 10);
  require_range("shape.max_tokens", shape.max_tokens, 0, kMaxInt / shape.top_k);
  require(shape.num_experts % num_ranks == 0, "shape.num_experts",
          "is " + std::to_string(shape.num_experts) + ", must be divisible by the " +
              std::to_string(num_ranks) + " ranks");
  require_values(config);
  require_range("row_capacity", config.row_capacity, 0, std::int64_t{1} << 36);
  require_range("saved_row_capacity", config.saved_row_capacity, 0, std::int64_t{1} << 36);
  require_range("num_threads", config.num_threads, 0, 4096);
  require_deadline("entry_deadline_s", config.entry_deadline_s);
  require_deadline("inner_deadline_s", config.inner_deadline_s);
  if (config.activation.kind == ActivationKind::clamped_swiglu) {
    require(std::isfinite(config.activation.limit) && config.activation.limit > 0,
            "activation.limit",
            "is " + std::to_string(config.activation.limit) + ", must be positive and finite");
  }
  require_range("num_sms", config.num_sms, 0, 1024);
  if (config.backend == Backend::cuda) validate_cuda(config, num_ranks);
}

}  // namespace megamoe
