// Checks the arguments of the row products, describes their tiles to the copy engine and launches.
#include <algorithm>

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
      down_eHI, launch.sharing == Sharing::rows ? kTileChannels : kTileChannels / 2, "down");
  params.row_inputs[0] = input_maps(a_NI, launch.sharing, "a");
  return launch;
}

RowProductLaunch describe_gate_up(const GroupedRows& rows, const ConstTensorView& x_NH,
                                  const ConstTensorView& gate_eIH, const ConstTensorView& up_eIH,
                                  const TensorView& g_NI, const TensorView& u_NI,
                                  const TensorView& a_NI, const LaunchOptions& options) {
  const std::int64_t num_rows = a_NI.sizes[0];
  const std::int64_t intermediate = a_NI.sizes[1];
  const std::int64_t hidden = x_NH.sizes[1];
  const bool saving = !g_NI.absent();
  check_groups(rows, "gate_up");
  check_rows(x_NH, num_rows, hidden, "x");
  check_rows(a_NI, num_rows, intermediate, "a");
  if (saving) {
    const std::int64_t kept_rows = std::min(g_NI.sizes[0], num_rows);
    check_rows(g_NI, kept_rows, intermediate, "g");
    check_rows(u_NI, kept_rows, intermediate, "u");
  }
  check_weights(gate_eIH, rows.num_groups, intermediate, hidden, "gate");
  check_weights(up_eIH, rows.num_groups, intermediate, hidden, "up");

  RowProductLaunch launch;
  RowProductParams& params = launch.params;
  params.rows = {rows.begin, rows.count, rows.num_groups};
  params.num_channel_tiles = ceil_div(intermediate, kTileChannels / 2);
  params.num_k_blocks = static_cast<int>(hidden / kBlockK);
  params.num_k_blocks_a_source = params.num_k_blocks;
  launch.sharing = choose_sharing(options, params.num_channel_tiles);
  params.weights[0] = weight_map_k_major(gate_eIH, kTileChannels / 2, "gate");
  params.weights[1] = weight_map_k_major(up_eIH, kTileChannels / 2, "up");
  params.row_inputs[0] = input_maps(x_NH, launch.sharing, "x");
  if (saving) {
    params.outputs[0] = whole_tile_maps(g_NI, "g");
    params.outputs[1] = whole_tile_maps(u_NI, "u");
    params.outputs[2] = whole_tile_maps(a_NI, "a");
  } else {
    params.outputs[0] = whole_tile_maps(a_NI, "a");
  }
  return launch;
}

RowProductLaunch describe_dx(const GroupedRows& rows, const ConstTensorView& dg_NI,
                             const ConstTensorView& du_NI, const ConstTensorView& gate_eIH,
                             const ConstTensorView& up_eIH, const LaunchOptions& options) {
  const std::int64_t num_rows = dg_NI.sizes[0];
  const std::int64_t intermediate = dg_NI.sizes[1];
  const std::int64_t hidden = gate_eIH.sizes[2];
  check_groups(rows, "dx");
  check_rows(dg_NI, num_rows, intermediate, "dg");
  check_rows(du_NI, num_rows, intermediate, "du");
  check_weights(gate_eIH, rows.num_groups, intermediate, hidden, "gate");
  check_weights(up_eIH, rows.num_groups, intermediate, hidden, "up");

  RowProductLaunch launch;
  RowProductParams& params = launch.params;
  params.rows = {rows.begin, rows.count, rows.num_groups};
  params.num_channel_tiles = ceil_div(hidden, kTileChannels);
  params.num_k_blocks = static_cast<int>(2 * intermediate / kBlockK);
  params.num_k_blocks_a_source = static_cast<int>(intermediate / kBlockK);
  launch.sharing = choose_sharing(options, params.num_channel_tiles);
  const int box_k = launch.sharing == Sharing::rows ? kBlockK : kBlockK / 2;
  params.weights[0] = weight_map_channel_major(gate_eIH, box_k, "gate");
  params.weights[1] = weight_map_channel_major(up_eIH, box_k, "up");
  params.row_inputs[0] = input_maps(dg_NI, launch.sharing, "dg");
  params.row_inputs[1] = input_maps(du_NI, launch.sharing, "du");
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
  launch.params.outputs[0] = whole_tile_maps(o_NH, "o");
  NoActivation activation{};
  launch_clusters(launch.sharing == Sharing::rows ? down_sharing_rows() : down_sharing_channels(),
                  {&launch.params, &activation}, options);
}

void multiply_gate_up(const GroupedRows& rows, const ConstTensorView& x_NH,
                      const ConstTensorView& gate_eIH, const ConstTensorView& up_eIH,
                      const TensorView& g_NI, const TensorView& u_NI, const TensorView& a_NI,
                      const LaunchOptions& options) {
  if (a_NI.sizes[0] == 0) return;
  RowProductLaunch launch =
      describe_gate_up(rows, x_NH, gate_eIH, up_eIH, g_NI, u_NI, a_NI, options);
  const bool shares_rows = launch.sharing == Sharing::rows;
  const void* kernel = nullptr;
  if (g_NI.absent()) {
    kernel = shares_rows ? gate_up_sharing_rows() : gate_up_sharing_channels();
  } else {
    kernel = shares_rows ? gate_up_saving_sharing_rows() : gate_up_saving_sharing_channels();
  }
  SwiGlu activation{};
  launch_clusters(kernel, {&launch.params, &activation}, options);
}

void multiply_dx(const GroupedRows& rows, const ConstTensorView& dg_NI,
                 const ConstTensorView& du_NI, const ConstTensorView& gate_eIH,
                 const ConstTensorView& up_eIH, const TensorView& dx_NH,
                 const LaunchOptions& options) {
  const std::int64_t num_rows = dx_NH.sizes[0];
  check_rows(dg_NI, num_rows, dg_NI.sizes[1], "dg");
  check_rows(dx_NH, num_rows, gate_eIH.sizes[2], "dx");
  if (num_rows == 0) return;
  RowProductLaunch launch = describe_dx(rows, dg_NI, du_NI, gate_eIH, up_eIH, options);
  launch.params.outputs[0] = whole_tile_maps(dx_NH, "dx");
  NoActivation activation{};
  launch_clusters(launch.sharing == Sharing::rows ? dx_sharing_rows() : dx_sharing_channels(),
                  {&launch.params, &activation}, options);
}

}  // namespace megamoe::products
