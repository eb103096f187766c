#include "kernels/rank_view.h"

#include <limits>
#include <string>

#include "megamoe/error.h"

namespace megamoe::gpu {
namespace {

void require(bool holds, const std::string& reason) {
  if (!holds) throw Error(ErrorCode::unsupported, "CUDA backend: " + reason);
}

}  // namespace

void check_supported(const WorkspaceDims& dims) {
  const RoutingDims& routing = dims.routing;
  const auto number = [](std::int64_t value) { return std::to_string(value); };
  require(routing.num_ranks <= kMaxRanks,
          "at most " + number(kMaxRanks) + " ranks, not " + number(routing.num_ranks));
  require(routing.num_experts <= kMaxExperts,
          "at most " + number(kMaxExperts) + " experts, not " + number(routing.num_experts));
  require(routing.top_k <= kMaxSlots,
          "at most " + number(kMaxSlots) + " slots a token, not " + number(routing.top_k));
  require(dims.hidden_dim % 64 == 0 && dims.intermediate_dim % 64 == 0,
          "hidden_dim and intermediate_dim must be multiples of 64, not " +
              number(dims.hidden_dim) + " and " + number(dims.intermediate_dim));
  // Rows and slots are numbered in 32 bits.
  const std::int64_t padding = kGpuRowAlignment * routing.num_experts;
  const std::int64_t most_rows = std::numeric_limits<std::int32_t>::max() - padding;
  require(dims.max_tokens <= most_rows / routing.num_ranks / routing.top_k,
          "max_tokens * top_k of all ranks must stay below " + number(most_rows) +
              ", max_tokens is " + number(dims.max_tokens));
}

RankView make_rank_view(const WorkspaceDims& dims, int rank) {
  check_supported(dims);
  RankView view;
  view.dims = dims;
  view.symmetric = gpu_symmetric_layout(dims);
  view.plan_layout = call_plan_layout(dims);
  view.scratch_layout = plan_scratch_layout(dims);
  view.rank = rank;
  return view;
}

void check_num_tokens(const RankView& view, std::int64_t num_tokens) {
  if (num_tokens >= 0 && num_tokens <= view.dims.max_tokens) return;
  throw Error(ErrorCode::internal, "a call of " + std::to_string(num_tokens) +
                                       " tokens on buffers for " +
                                       std::to_string(view.dims.max_tokens));
}

}  // namespace megamoe::gpu
