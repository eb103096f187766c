#include "comm/gpu_limits.h"

#include <limits>
#include <string>

#include "comm/gpu_workspace_layout.h"
#include "megamoe/error.h"

namespace megamoe {
namespace {

void require(bool holds, const char* member, std::int64_t value, const std::string& rule) {
  if (holds) return;
  throw Error(ErrorCode::unsupported, std::string(member) + " is " + std::to_string(value) +
                                          "; the cuda backend takes " + rule);
}

std::string at_most(std::int32_t most) { return "at most " + std::to_string(most); }

}  // namespace

void check_gpu_limits(const WorkspaceDims& dims) {
  const RoutingDims& routing = dims.routing;
  require(dims.hidden_dim % 64 == 0, "shape.hidden_dim", dims.hidden_dim, "multiples of 64");
  require(dims.intermediate_dim % 64 == 0, "shape.intermediate_dim", dims.intermediate_dim,
          "multiples of 64");
  require(routing.num_ranks <= kMaxRanks, "num_ranks", routing.num_ranks, at_most(kMaxRanks));
  require(routing.num_experts <= kMaxExperts, "shape.num_experts", routing.num_experts,
          at_most(kMaxExperts));
  require(routing.top_k <= kMaxSlots, "shape.top_k", routing.top_k, at_most(kMaxSlots));
  // Rows and slots are numbered in 32 bits.
  const std::int64_t padding = kGpuRowAlignment * routing.num_experts;
  const std::int64_t most_rows = std::numeric_limits<std::int32_t>::max() - padding;
  require(dims.max_tokens <= most_rows / routing.num_ranks / routing.top_k, "shape.max_tokens",
          dims.max_tokens, "max_tokens * top_k of all ranks below " + std::to_string(most_rows));
}

}  // namespace megamoe
