// Checks the arguments of the row products, describes their tiles to the copy engine and launches.
#include <algorithm>
#include <type_traits>

#include "base/activation.h"
#include "kernels/products/entries.h"
#include "kernels/products/host_checks.h"
#include "kernels/products/host_maps.h"
#include "kernels/products/products.h"
#include "kernels/products/row_product_launch.h"

namespace megamoe::products {
RowProductLaunch describe_down(const GroupedRows& rows, const ConstTensorView& a_NI,
                               const ConstTensorView& down_eHI, const LaunchOptions& options) {
  const std::int64_t intermediate = a_NI.sizes[1];
  const std::int64_t hidden = down_eHI.sizes[1];
  check_groups(rows, "down");
  check_rows(a_NI, a_NI.sizes[0], intermediate, "a");
  check_weights(down_eHI, rows.num_groups, hidden, intermediate, "down");

  RowProductLaunch launch;
  RowProductParams& params = launch.params;
  params.rows = {rows.begin, rows.count, rows.num_groups};
  params.num_channel_tiles = ceil_div(hidden, kTileChannels);
  params.num_k_blocks = static_cast<int>(intermediate / kBlockK);
  params.num_k_blocks_a_source = params.num_k_blocks;
  launch.sharing = choose_sharing(options, params.num_channel_tiles);
  params.weights[0] = weight_map_k_major(
      options, down_eHI, launch.sharing == Sharing::rows ? kTileChannels : kTileChannels / 2,
      "down");
  params.row_inputs[0] = input_maps(options, a_NI, launch.sharing, "a");
  set_measured(params, options, device::ProductKind::down);
  return launch;
}

RowProductLaunch describe_gate_up(const GroupedRows& rows, const Activation& activation,
                                  const ConstTensorView& x_NH, const ConstTensorView& gate_eIH,
                                  const ConstTensorView& up_eIH, const TensorView& g_NI,
                                  const TensorView& u_NI, const TensorView& a_NI,
                                  const LaunchOptions& options) {
  const std::int64_t num_rows = a_NI.sizes[0];
  const std::int64_t intermediate = a_NI.sizes[1];
  const std::int64_t hidden = x_NH.sizes[1];
  const bool gated = is_gated(activation.kind);
  const bool saving = !u_NI.absent();
  check_groups(rows, "gate_up");
  check_rows(x_NH, num_rows, hidden, "x");
  check_rows(a_NI, num_rows, intermediate, "a");
  const std::int64_t kept_rows = saving ? std::min(u_NI.sizes[0], num_rows) : num_rows;
  if (saving) check_rows(u_NI, kept_rows, intermediate, "u");
  check_weights(up_eIH, rows.num_groups, intermediate, hidden, "up");
  if (gated) {
    if (saving || !g_NI.absent()) check_rows(g_NI, kept_rows, intermediate, "g");
    if (!saving && !g_NI.absent()) check_rows(u_NI, kept_rows, intermediate, "u");
    check_weights(gate_eIH, rows.num_groups, intermediate, hidden, "gate");
  } else {
    check_absent(g_NI, activation, "g");
    check_absent(gate_eIH, activation, "gate");
  }

  RowProductLaunch launch;
  RowProductParams& params = launch.params;
  params.rows = {rows.begin, rows.count, rows.num_groups};
  params.num_channel_tiles = ceil_div(intermediate, gated ? kTileChannels / 2 : kTileChannels);
  params.num_k_blocks = static_cast<int>(hidden / kBlockK);
  params.num_k_blocks_a_source = params.num_k_blocks;
  launch.sharing = activation.kind == ActivationKind::swiglu
                       ? choose_sharing(options, params.num_channel_tiles)
                       : Sharing::channels;
  int num_weights = 0;
  int num_outputs = 0;
  if (gated) {
    params.weights[num_weights++] =
        weight_map_k_major(options, gate_eIH, kTileChannels / 2, "gate");
    if (saving) params.outputs[num_outputs++] = whole_tile_maps(options, g_NI, "g");
  }
  params.weights[num_weights] = weight_map_k_major(options, up_eIH, kTileChannels / 2, "up");
  if (saving) params.outputs[num_outputs++] = whole_tile_maps(options, u_NI, "u");
  params.outputs[num_outputs] = whole_tile_maps(options, a_NI, "a");
  params.row_inputs[0] = input_maps(options, x_NH, launch.sharing, "x");
  set_measured(params, options, device::ProductKind::gate_up);
  return launch;
}

RowProductLaunch describe_dx(const GroupedRows& rows, const ConstTensorView& dg_NI,
                             const ConstTensorView& du_NI, const ConstTensorView& gate_eIH,
                             const ConstTensorView& up_eIH, const LaunchOptions& options) {
  const std::int64_t num_rows = du_NI.sizes[0];
  const std::int64_t intermediate = du_NI.sizes[1];
  const std::int64_t hidden = up_eIH.sizes[2];
  const bool gated = !dg_NI.absent() || !gate_eIH.absent();
  check_groups(rows, "dx");
  check_rows(du_NI, num_rows, intermediate, "du");
  if (gated) {
    check_rows(dg_NI, num_rows, intermediate, "dg");
    check_weights(gate_eIH, rows.num_groups, intermediate, hidden, "gate");
  }
  check_weights(up_eIH, rows.num_groups, intermediate, hidden, "up");

  RowProductLaunch launch;
  RowProductParams& params = launch.params;
  params.rows = {rows.begin, rows.count, rows.num_groups};
  params.num_channel_tiles = ceil_div(hidden, kTileChannels);
  params.num_k_blocks_a_source = static_cast<int>(intermediate / kBlockK);
  params.num_k_blocks = (gated ? 2 : 1) * params.num_k_blocks_a_source;
  launch.sharing = choose_sharing(options, params.num_channel_tiles);
  const int box_k = launch.sharing == Sharing::rows ? kBlockK : kBlockK / 2;
  int source = 0;
  if (gated) {
    params.weights[source] = weight_map_channel_major(options, gate_eIH, box_k, "gate");
    params.row_inputs[source] = input_maps(options, dg_NI, launch.sharing, "dg");
    ++source;
  }
  params.weights[source] = weight_map_channel_major(options, up_eIH, box_k, "up");
  params.row_inputs[source] = input_maps(options, du_NI, launch.sharing, "du");
  set_measured(params, options, device::ProductKind::dx);
  return launch;
}

void multiply_down(const GroupedRows& rows, const ConstTensorView& a_NI,
                   const ConstTensorView& down_eHI, const TensorView& o_NH,
                   const LaunchOptions& options) {
  const std::int64_t num_rows = o_NH.sizes[0];
  check_rows(a_NI, num_rows, a_NI.sizes[1], "a");
  check_rows(o_NH, num_rows, down_eHI.sizes[1], "o");
  if (num_rows == 0) return;
  RowProductLaunch launch = describe_down(rows, a_NI, down_eHI, options);
  launch.params.outputs[0] = whole_tile_maps(options, o_NH, "o");
  NoActivation activation{};
  launch_clusters(launch.sharing == Sharing::rows ? down_sharing_rows() : down_sharing_channels(),
                  {&launch.params, &activation}, options);
}

namespace {

// The kernel that computes a, and whether its clusters share rows or channels.
template <class Policy>
const void* gate_up_kernel(Sharing sharing, bool saving) {
  if constexpr (std::is_same_v<Policy, SwiGlu>) {
    if (sharing == Sharing::rows) {
      return saving ? gate_up_saving_sharing_rows() : gate_up_sharing_rows();
    }
    return saving ? gate_up_saving_sharing_channels() : gate_up_sharing_channels();
  } else if constexpr (Policy::kGated) {
    return saving ? row_product_with<RowProduct::gate_up_saving, Policy>()
                  : row_product_with<RowProduct::gate_up, Policy>();
  } else {
    return saving ? row_product_with<RowProduct::up_saving, Policy>()
                  : row_product_with<RowProduct::up, Policy>();
  }
}

}  // namespace

void multiply_gate_up(const GroupedRows& rows, const Activation& activation,
                      const ConstTensorView& x_NH, const ConstTensorView& gate_eIH,
                      const ConstTensorView& up_eIH, const TensorView& g_NI, const TensorView& u_NI,
                      const TensorView& a_NI, const LaunchOptions& options) {
  if (a_NI.sizes[0] == 0) return;
  RowProductLaunch launch =
      describe_gate_up(rows, activation, x_NH, gate_eIH, up_eIH, g_NI, u_NI, a_NI, options);
  const bool saving = !u_NI.absent();
  with_activation(activation, [&](auto policy) {
    launch_clusters(gate_up_kernel<decltype(policy)>(launch.sharing, saving),
                    {&launch.params, &policy}, options);
  });
}

void multiply_dx(const GroupedRows& rows, const ConstTensorView& dg_NI,
                 const ConstTensorView& du_NI, const ConstTensorView& gate_eIH,
                 const ConstTensorView& up_eIH, const TensorView& dx_NH,
                 const LaunchOptions& options) {
  const std::int64_t num_rows = dx_NH.sizes[0];
  check_rows(du_NI, num_rows, du_NI.sizes[1], "du");
  check_rows(dx_NH, num_rows, up_eIH.sizes[2], "dx");
  if (num_rows == 0) return;
  RowProductLaunch launch = describe_dx(rows, dg_NI, du_NI, gate_eIH, up_eIH, options);
  launch.params.outputs[0] = whole_tile_maps(options, dx_NH, "dx");
  NoActivation activation{};
  launch_clusters(launch.sharing == Sharing::rows ? dx_sharing_rows() : dx_sharing_channels(),
                  {&launch.params, &activation}, options);
}

}  // namespace megamoe::products
