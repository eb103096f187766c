// Checks the arguments of the row products, describes their tiles to the copy engine and launches.
#include <algorithm>

#include "base/activation.h"
#include "kernels/products/entries.h"
#include "kernels/products/host_checks.h"
#include "kernels/products/host_maps.h"
#include "kernels/products/products.h"
#include "kernels/products/row_product.h"

namespace megamoe::products {
void multiply_down(const GroupedRows& rows, const ConstTensorView& a_NI,
                   const ConstTensorView& down_eHI, const TensorView& o_NH,
                   const LaunchOptions& options) {
  const std::int64_t num_rows = o_NH.sizes[0];
  const std::int64_t hidden = o_NH.sizes[1];
  const std::int64_t intermediate = a_NI.sizes[1];
  check_groups(rows, "down");
  check_rows(a_NI, num_rows, intermediate, "a");
  check_rows(o_NH, num_rows, hidden, "o");
  check_weights(down_eHI, rows.num_groups, hidden, intermediate, "down");
  if (num_rows == 0) return;

  NoActivation activation{};
  RowProductParams params{};
  params.rows = {rows.begin, rows.count, rows.num_groups};
  params.num_channel_tiles = ceil_div(hidden, kTileChannels);
  params.num_k_blocks = static_cast<int>(intermediate / kBlockK);
  params.num_k_blocks_a_source = params.num_k_blocks;
  const Sharing sharing = choose_sharing(options, params.num_channel_tiles);
  params.weights[0] = weight_map_k_major(
      down_eHI, sharing == Sharing::rows ? kTileChannels : kTileChannels / 2, "down");
  params.row_inputs[0] = input_maps(a_NI, sharing, "a");
  params.outputs[0] = whole_tile_maps(o_NH, "o");
  launch_clusters(sharing == Sharing::rows ? down_sharing_rows() : down_sharing_channels(),
                  {&params, &activation}, options);
}

void multiply_gate_up(const GroupedRows& rows, const ConstTensorView& x_NH,
                      const ConstTensorView& gate_eIH, const ConstTensorView& up_eIH,
                      const TensorView& g_NI, const TensorView& u_NI, const TensorView& a_NI,
                      const LaunchOptions& options) {
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
  if (num_rows == 0) return;

  SwiGlu activation{};
  RowProductParams params{};
  params.rows = {rows.begin, rows.count, rows.num_groups};
  params.num_channel_tiles = ceil_div(intermediate, kTileChannels / 2);
  params.num_k_blocks = static_cast<int>(hidden / kBlockK);
  params.num_k_blocks_a_source = params.num_k_blocks;
  const Sharing sharing = choose_sharing(options, params.num_channel_tiles);
  params.weights[0] = weight_map_k_major(gate_eIH, kTileChannels / 2, "gate");
  params.weights[1] = weight_map_k_major(up_eIH, kTileChannels / 2, "up");
  params.row_inputs[0] = input_maps(x_NH, sharing, "x");
  if (saving) {
    params.outputs[0] = whole_tile_maps(g_NI, "g");
    params.outputs[1] = whole_tile_maps(u_NI, "u");
    params.outputs[2] = whole_tile_maps(a_NI, "a");
    launch_clusters(sharing == Sharing::rows ? gate_up_saving_sharing_rows()
                                             : gate_up_saving_sharing_channels(),
                    {&params, &activation}, options);
  } else {
    params.outputs[0] = whole_tile_maps(a_NI, "a");
    launch_clusters(sharing == Sharing::rows ? gate_up_sharing_rows() : gate_up_sharing_channels(),
                    {&params, &activation}, options);
  }
}

void multiply_dx(const GroupedRows& rows, const ConstTensorView& dg_NI,
                 const ConstTensorView& du_NI, const ConstTensorView& gate_eIH,
                 const ConstTensorView& up_eIH, const TensorView& dx_NH,
                 const LaunchOptions& options) {
  const std::int64_t num_rows = dx_NH.sizes[0];
  const std::int64_t hidden = dx_NH.sizes[1];
  const std::int64_t intermediate = dg_NI.sizes[1];
  check_groups(rows, "dx");
  check_rows(dg_NI, num_rows, intermediate, "dg");
  check_rows(du_NI, num_rows, intermediate, "du");
  check_rows(dx_NH, num_rows, hidden, "dx");
  check_weights(gate_eIH, rows.num_groups, intermediate, hidden, "gate");
  check_weights(up_eIH, rows.num_groups, intermediate, hidden, "up");
  if (num_rows == 0) return;

  NoActivation activation{};
  RowProductParams params{};
  params.rows = {rows.begin, rows.count, rows.num_groups};
  params.num_channel_tiles = ceil_div(hidden, kTileChannels);
  params.num_k_blocks = static_cast<int>(2 * intermediate / kBlockK);
  params.num_k_blocks_a_source = static_cast<int>(intermediate / kBlockK);
  const Sharing sharing = choose_sharing(options, params.num_channel_tiles);
  const int box_k = sharing == Sharing::rows ? kBlockK : kBlockK / 2;
  params.weights[0] = weight_map_channel_major(gate_eIH, box_k, "gate");
  params.weights[1] = weight_map_channel_major(up_eIH, box_k, "up");
  params.row_inputs[0] = input_maps(dg_NI, sharing, "dg");
  params.row_inputs[1] = input_maps(du_NI, sharing, "du");
  params.outputs[0] = whole_tile_maps(dx_NH, "dx");
  launch_clusters(sharing == Sharing::rows ? dx_sharing_rows() : dx_sharing_channels(),
                  {&params, &activation}, options);
}

}  // namespace megamoe::products
