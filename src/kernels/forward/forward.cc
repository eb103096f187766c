// Launches of the products under which rows travel.
#include "kernels/forward/forward.h"

#include "base/activation.h"
#include "kernels/forward/entries.h"
#include "kernels/forward/pull_params.h"
#include "kernels/launch.h"
#include "kernels/products/host_checks.h"
#include "kernels/products/row_product_launch.h"

namespace megamoe::gpu {
namespace {

using products::RowProductLaunch;
using products::Sharing;

products::GroupedRows groups_of(const RankView& view, std::byte* plan) {
  return {view.plan_layout.group_begin_e.in(plan), view.plan_layout.group_count_e.in(plan),
          view.routing().experts_per_rank()};
}

PullParams pull_params(const RankView& view, const PulledRows& rows) {
  constexpr int kMaxVectors = kPullChunkBytes / kPullVectorBytes;
  constexpr int kLineVectors = 128 / kPullVectorBytes;
  PullParams params;
  params.num_vectors =
      static_cast<std::int32_t>(view.dims.hidden_dim * sizeof(bf16)) / kPullVectorBytes;
  const int num_chunks = products::ceil_div(params.num_vectors, kMaxVectors);
  params.chunk_vectors = static_cast<std::int32_t>(
      round_up(products::ceil_div(params.num_vectors, num_chunks), kLineVectors));
  const SymmetricLayout& layout = view.symmetric.exchange;
  params.passes[params.num_passes++] = {layout.staged_rows_TH.offset, rows.x_CH};
  if (rows.dy_CH != nullptr) {
    params.passes[params.num_passes++] = {layout.staged_dy_TH.offset, rows.dy_CH};
  }
  return params;
}

void launch_push(RowProductLaunch& launch, const RankView& view, const RowOrigin* origin_C,
                 const void* sharing_rows, const void* sharing_channels,
                 const products::LaunchOptions& options) {
  RankView view_copy = view;
  products::launch_clusters(launch.sharing == Sharing::rows ? sharing_rows : sharing_channels,
                            {&launch.params, &view_copy, &origin_C}, options,
                            products::push_shared_bytes());
}

}  // namespace

void gate_up_and_pull(const RankView& view, std::byte* plan, const PulledRows& rows,
                      const GateUpTensors& tensors, const products::LaunchOptions& options) {
  const std::int64_t num_rows = tensors.a_CI.sizes[0];
  if (num_rows == 0) return;
  const ConstTensorView x_CH =
      tensor_view(static_cast<const bf16*>(rows.x_CH), {num_rows, view.dims.hidden_dim});
  RowProductLaunch launch =
      products::describe_gate_up(groups_of(view, plan), {ActivationKind::swiglu}, x_CH, tensors.gate_eIH, tensors.up_eIH,
                                 tensors.g_CI, tensors.u_CI, tensors.a_CI, options);
  const bool shares_rows = launch.sharing == Sharing::rows;
  const void* kernel = nullptr;
  if (tensors.g_CI.absent()) {
    kernel = shares_rows ? products::gate_up_and_pull_sharing_rows()
                         : products::gate_up_and_pull_sharing_channels();
  } else {
    kernel = shares_rows ? products::gate_up_saving_and_pull_sharing_rows()
                         : products::gate_up_saving_and_pull_sharing_channels();
  }
  SwiGlu activation{};
  RankView view_copy = view;
  PullParams pulls = pull_params(view, rows);
  products::launch_clusters(kernel, {&launch.params, &activation, &view_copy, &pulls}, options,
                            products::pull_shared_bytes());
}

void down_and_push(const RankView& view, std::byte* plan, const RowOrigin* origin_C,
                   const ConstTensorView& a_CI, const ConstTensorView& down_eHI,
                   const products::LaunchOptions& options) {
  if (a_CI.sizes[0] == 0) return;
  RowProductLaunch launch = products::describe_down(groups_of(view, plan), a_CI, down_eHI, options);
  launch_push(launch, view, origin_C, products::down_and_push_sharing_rows(),
              products::down_and_push_sharing_channels(), options);
}

void dx_and_push(const RankView& view, std::byte* plan, const RowOrigin* origin_C,
                 const ConstTensorView& dg_CI, const ConstTensorView& du_CI,
                 const ConstTensorView& gate_eIH, const ConstTensorView& up_eIH,
                 const products::LaunchOptions& options) {
  if (du_CI.sizes[0] == 0) return;
  RowProductLaunch launch =
      products::describe_dx(groups_of(view, plan), dg_CI, du_CI, gate_eIH, up_eIH, options);
  launch_push(launch, view, origin_C, products::dx_and_push_sharing_rows(),
              products::dx_and_push_sharing_channels(), options);
}

void load_overlap_kernels() {
  for (const void* kernel :
       {products::gate_up_and_pull_sharing_rows(), products::gate_up_and_pull_sharing_channels(),
        products::gate_up_saving_and_pull_sharing_rows(),
        products::gate_up_saving_and_pull_sharing_channels(),
        products::down_and_push_sharing_rows(), products::down_and_push_sharing_channels(),
        products::dx_and_push_sharing_rows(), products::dx_and_push_sharing_channels()}) {
    load_kernel(kernel);
  }
}

}  // namespace megamoe::gpu
