// Which rows have g and u kept, and which must be computed again.
#include "kernels/launch.h"
#include "kernels/plan/plan.h"

namespace megamoe::gpu {
namespace {

__global__ __launch_bounds__(kMaxExperts) void split_kernel(const __grid_constant__ RankView view,
                                                            std::byte* plan,
                                                            const std::int32_t kept_rows) {
  const int expert = static_cast<int>(threadIdx.x);
  if (expert >= view.routing().experts_per_rank()) return;
  const CallPlanLayout& layout = view.plan_layout;
  const std::int32_t begin = layout.group_begin_e.in(plan)[expert];
  const std::int32_t count = layout.group_count_e.in(plan)[expert];
  const std::int32_t kept = max(0, min(count, kept_rows - begin));
  layout.kept_count_e.in(plan)[expert] = kept;
  layout.other_begin_e.in(plan)[expert] = begin + kept;
  layout.other_count_e.in(plan)[expert] = count - kept;
  if (kept < count) {
    // g and u of the other rows need x soon: it is not left to the weight gradients.
    view.scratch_layout.pull_progress.in(view.scratch)[static_cast<int>(PulledBy::weight_gradients)]
        .num_pulls = 0;
  }
}

}  // namespace

void split_groups(const RankView& view, std::byte* plan, std::int64_t kept_rows,
                  cudaStream_t stream) {
  split_kernel<<<1, kMaxExperts, 0, stream>>>(view, plan, static_cast<std::int32_t>(kept_rows));
  check_launch("split_groups");
}

void load_split_kernel() { load_kernel(reinterpret_cast<const void*>(&split_kernel)); }

}  // namespace megamoe::gpu
