#include "kernels/rank_view.h"

#include <string>

#include "comm/gpu_limits.h"
#include "megamoe/error.h"

namespace megamoe::gpu {

RankView make_rank_view(const WorkspaceDims& dims, int rank) {
  check_gpu_limits(dims);
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
