// Checks the arguments of p and its epilogue, describes their tiles to the copy engine and
// launches.
#include <string>
#include <type_traits>

#include "base/activation.h"
#include "kernels/gate_up_gradient/gate_up_gradient_launch.h"
#include "kernels/products/entries.h"
#include "kernels/products/host_checks.h"
#include "kernels/products/host_maps.h"
#include "kernels/products/products.h"
#include "megamoe/error.h"

namespace megamoe::products {

namespace {

template <class Policy>
const void* gradient_kernel(Sharing sharing) {
  if constexpr (std::is_same_v<Policy, SwiGlu>) {
    return sharing == Sharing::rows ? gate_up_gradient_sharing_rows()
                                    : gate_up_gradient_sharing_channels();
  } else {
    return gate_up_gradient_with<Policy>();
  }
}

}  // namespace

GateUpGradientLaunch describe_gate_up_gradient(
    const GroupedRows& rows, const Activation& activation, const ConstTensorView& dy_NH,
    const ConstTensorView& down_eHI, const ConstTensorView& g_NI, const ConstTensorView& u_NI,
    const float* row_weights, const GateUpGradientOutputs& outputs, const LaunchOptions& options) {
  const std::int64_t num_rows = dy_NH.sizes[0];
  const std::int64_t hidden = dy_NH.sizes[1];
  const std::int64_t intermediate = u_NI.sizes[1];
  const bool gated = is_gated(activation.kind);
  check_groups(rows, "gate_up_gradient");
  check_rows(dy_NH, num_rows, hidden, "dy");
  check_rows(u_NI, u_NI.sizes[0], intermediate, "u");
  if (gated) {
    check_rows(g_NI, u_NI.sizes[0], intermediate, "g");
    check_rows(outputs.dg_NI, num_rows, intermediate, "dg");
  } else {
    check_absent(g_NI, activation, "g");
    check_absent(outputs.dg_NI, activation, "dg");
  }
  check_rows(outputs.du_NI, num_rows, intermediate, "du");
  check_rows(outputs.wa_NI, num_rows, intermediate, "wa");
  check_weights(down_eHI, rows.num_groups, hidden, intermediate, "down");
  if (num_rows % schedule::kRowsPerUnit != 0) {
    throw Error(ErrorCode::invalid_argument,
                "row capacity must be a multiple of 16, got " + std::to_string(num_rows));
  }
  if (row_weights == nullptr) throw Error(ErrorCode::invalid_argument, "row_weights: absent");
  if (outputs.dw_segments == nullptr)
    throw Error(ErrorCode::invalid_argument, "dw_segments: absent");

  GateUpGradientLaunch launch;
  GateUpGradientParams& params = launch.params;
  params.num_channels = static_cast<int>(intermediate);
  params.num_channel_tiles = ceil_div(intermediate, gradient::kTileChannels);
  params.num_k_blocks = static_cast<int>(hidden / kBlockK);
  params.rows = {rows.begin, rows.count, rows.num_groups};
  params.row_weights = row_weights;
  params.dw_segments = outputs.dw_segments;
  params.row_capacity = num_rows;
  launch.sharing = activation.kind == ActivationKind::swiglu
                       ? choose_sharing(options, params.num_channel_tiles)
                       : Sharing::channels;
  params.down = weight_map_channel_major(options, down_eHI,
                                         launch.sharing == Sharing::rows ? kBlockK : kBlockK / 2,
                                         "down", gradient::kTileChannels);
  params.dy = input_maps(options, dy_NH, launch.sharing, "dy");
  if (gated) {
    params.g = row_map(options, g_NI, gradient::kPartRows, "g");
    params.dg = row_map(options, outputs.dg_NI, gradient::kPartRows, "dg");
  }
  params.u = row_map(options, u_NI, gradient::kPartRows, "u");
  params.du = row_map(options, outputs.du_NI, gradient::kPartRows, "du");
  params.wa = row_map(options, outputs.wa_NI, gradient::kPartRows, "wa");
  set_measured(params, options, device::ProductKind::gate_up_gradient);
  return launch;
}

void multiply_gate_up_gradient(const GroupedRows& rows, const Activation& activation,
                               const ConstTensorView& dy_NH, const ConstTensorView& down_eHI,
                               const ConstTensorView& g_NI, const ConstTensorView& u_NI,
                               const float* row_weights, const GateUpGradientOutputs& outputs,
                               const LaunchOptions& options) {
  if (dy_NH.sizes[0] == 0) return;
  GateUpGradientLaunch launch = describe_gate_up_gradient(rows, activation, dy_NH, down_eHI, g_NI,
                                                          u_NI, row_weights, outputs, options);
  with_activation(activation, [&](auto policy) {
    launch_clusters(gradient_kernel<decltype(policy)>(launch.sharing), {&launch.params, &policy},
                    options, sizeof(gradient::Storage));
  });
}

}  // namespace megamoe::products
