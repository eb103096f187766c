// Launches of the products under which rows travel.
#include "kernels/forward/forward.h"

#include <type_traits>

#include "base/activation.h"
#include "kernels/forward/entries.h"
#include "kernels/forward/reduce_targets.h"
#include "kernels/gate_up_gradient/gate_up_gradient_launch.h"
#include "kernels/launch.h"
#include "kernels/products/host_checks.h"
#include "kernels/products/row_product_launch.h"
#include "kernels/weight_gradients/weight_gradient_launch.h"

namespace megamoe::gpu {
namespace {

using products::RowProductLaunch;
using products::Sharing;

products::GroupedRows groups_of(const RankView& view, std::byte* plan) {
  return {view.plan_layout.group_begin_e.in(plan), view.plan_layout.group_count_e.in(plan),
          view.routing().experts_per_rank()};
}

/// Passes are added by the caller.
PullParams cut_rows(const RankView& view) {
  constexpr int kLineVectors = 128 / kPullVectorBytes;
  PullParams params;
  params.num_vectors =
      static_cast<std::int32_t>(view.dims.hidden_dim * sizeof(bf16)) / kPullVectorBytes;
  const int num_chunks = products::ceil_div(params.num_vectors, kPullChunkBytes / kPullVectorBytes);
  params.chunk_vectors = static_cast<std::int32_t>(
      round_up(products::ceil_div(params.num_vectors, num_chunks), kLineVectors));
  return params;
}

PullPass pass_of_x(const RankView& view, const PulledRows& rows) {
  return {view.symmetric.exchange.staged_rows_TH.offset, rows.x_CH};
}
PullPass pass_of_dy(const RankView& view, const PulledRows& rows) {
  return {view.symmetric.exchange.staged_dy_TH.offset, rows.dy_CH};
}

ConstTensorView rows_view(const RankView& view, const bf16* rows, std::int64_t num_rows) {
  return tensor_view(rows, {num_rows, view.dims.hidden_dim});
}

template <class Policy>
const void* pull_kernel(Sharing sharing, bool saving) {
  using products::RowProduct;
  if constexpr (std::is_same_v<Policy, SwiGlu>) {
    if (sharing == Sharing::rows) {
      return saving ? products::gate_up_saving_and_pull_sharing_rows()
                    : products::gate_up_and_pull_sharing_rows();
    }
    return saving ? products::gate_up_saving_and_pull_sharing_channels()
                  : products::gate_up_and_pull_sharing_channels();
  } else if constexpr (Policy::kGated) {
    return saving ? products::gate_up_and_pull_with<RowProduct::gate_up_saving, Policy>()
                  : products::gate_up_and_pull_with<RowProduct::gate_up, Policy>();
  } else {
    return saving ? products::gate_up_and_pull_with<RowProduct::up_saving, Policy>()
                  : products::gate_up_and_pull_with<RowProduct::up, Policy>();
  }
}

template <class Policy>
const void* gradient_pull_kernel(Sharing sharing) {
  if constexpr (std::is_same_v<Policy, SwiGlu>) {
    return sharing == Sharing::rows ? products::gate_up_gradient_and_pull_sharing_rows()
                                    : products::gate_up_gradient_and_pull_sharing_channels();
  } else {
    return products::gate_up_gradient_and_pull_with<Policy>();
  }
}

const void* gradients_kernel(products::GradientType type, Sharing sharing) {
  if (type == products::GradientType::bf16) {
    return sharing == Sharing::rows
               ? products::weight_gradients_beside_rows_bf16_sharing_rows()
               : products::weight_gradients_beside_rows_bf16_sharing_channels();
  }
  return sharing == Sharing::rows ? products::weight_gradients_beside_rows_fp32_sharing_rows()
                                  : products::weight_gradients_beside_rows_fp32_sharing_channels();
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

void gate_up_and_pull(const RankView& view, std::byte* plan, const Activation& activation,
                      const PulledRows& rows, const GateUpTensors& tensors,
                      const products::LaunchOptions& options) {
  const std::int64_t num_rows = tensors.a_CI.sizes[0];
  if (num_rows == 0) return;
  const ConstTensorView x_CH = rows_view(view, rows.x_CH, num_rows);
  RowProductLaunch launch =
      products::describe_gate_up(groups_of(view, plan), activation, x_CH, tensors.gate_eIH,
                                 tensors.up_eIH, tensors.g_CI, tensors.u_CI, tensors.a_CI, options);
  const bool saving = !tensors.u_CI.absent();
  RankView view_copy = view;
  PullParams pulls = cut_rows(view);
  pulls.passes[pulls.num_passes++] = pass_of_x(view, rows);
  if (rows.dy_CH != nullptr) pulls.passes[pulls.num_passes++] = pass_of_dy(view, rows);
  with_activation(activation, [&](auto policy) {
    products::launch_clusters(pull_kernel<decltype(policy)>(launch.sharing, saving),
                              {&launch.params, &policy, &view_copy, &pulls}, options,
                              products::pull_shared_bytes());
  });
}

void gate_up_gradient_and_pull(const RankView& view, const products::GroupedRows& groups,
                               const Activation& activation, const PulledRows& rows,
                               const ConstTensorView& down_eHI, const ConstTensorView& g_CI,
                               const ConstTensorView& u_CI,
                               const products::GateUpGradientOutputs& outputs, LastPass x_pass,
                               const products::LaunchOptions& options) {
  const std::int64_t num_rows = outputs.wa_NI.sizes[0];
  if (num_rows == 0) return;
  products::GateUpGradientLaunch launch =
      products::describe_gate_up_gradient(groups, activation, rows_view(view, rows.dy_CH, num_rows),
                                          down_eHI, g_CI, u_CI, rows.weight_C, outputs, options);
  RankView view_copy = view;
  PullParams pulls = cut_rows(view);
  pulls.passes[pulls.num_passes++] = pass_of_dy(view, rows);
  pulls.passes[pulls.num_passes++] = pass_of_x(view, rows);
  pulls.last_pass = x_pass;
  with_activation(activation, [&](auto policy) {
    products::launch_clusters(gradient_pull_kernel<decltype(policy)>(launch.sharing),
                              {&launch.params, &policy, &view_copy, &pulls}, options,
                              products::gradient_pull_shared_bytes());
  });
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

void weight_gradients_beside_rows(const RankView& view, std::byte* plan,
                                  std::span<const products::WeightGradient> gradients,
                                  products::GradientMode mode, const RowsBeside& beside,
                                  const products::LaunchOptions& options) {
  products::WeightGradientLaunch launch = products::describe_weight_gradients(
      groups_of(view, plan), gradients, mode, options, &view.control()->call_failed);
  launch.params.num_early_jobs = beside.num_without_x;
  launch.params.num_tiles_taken = view.num_tiles_taken(device::ProductKind::weight_gradients);
  PullParams pulls = cut_rows(view);
  pulls.by = PulledBy::weight_gradients;
  if (beside.x_CH != nullptr) {
    pulls.passes[pulls.num_passes++] = pass_of_x(view, {.x_CH = beside.x_CH});
  }
  ReduceTargets targets{view.plan_layout.ids_TK.in(plan), beside.dx_TH, beside.dweights_TK,
                        static_cast<std::int32_t>(beside.num_tokens)};
  RankView view_copy = view;
  products::launch_clusters(gradients_kernel(launch.type, launch.sharing),
                            {&launch.params, &view_copy, &pulls, &targets}, options,
                            products::rows_beside_shared_bytes(launch.type));
}

void load_overlap_kernels() {
  for (const Sharing sharing : {Sharing::rows, Sharing::channels}) {
    for (const ActivationKind kind :
         {ActivationKind::swiglu, ActivationKind::clamped_swiglu, ActivationKind::gelu_erf,
          ActivationKind::gelu_tanh, ActivationKind::relu2, ActivationKind::identity}) {
      with_activation({kind}, [&](auto policy) {
        using Policy = decltype(policy);
        for (const bool saving : {false, true}) load_kernel(pull_kernel<Policy>(sharing, saving));
        load_kernel(gradient_pull_kernel<Policy>(sharing));
      });
    }
  }
  for (const void* kernel :
       {products::down_and_push_sharing_rows(), products::down_and_push_sharing_channels(),
        products::dx_and_push_sharing_rows(), products::dx_and_push_sharing_channels(),
        products::weight_gradients_beside_rows_bf16_sharing_rows(),
        products::weight_gradients_beside_rows_bf16_sharing_channels(),
        products::weight_gradients_beside_rows_fp32_sharing_rows(),
        products::weight_gradients_beside_rows_fp32_sharing_channels()}) {
    load_kernel(kernel);
  }
}

}  // namespace megamoe::gpu
