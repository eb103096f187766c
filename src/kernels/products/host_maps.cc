#include "kernels/products/host_maps.h"

#include "device/tensor_map.h"

namespace megamoe::products {
namespace {

RowMaps row_maps(const ConstTensorView& rows, int rows_per_unit, const char* name) {
  RowMaps maps;
  for (int units = 1; units <= schedule::kMaxUnitsPerTile; ++units) {
    device::TileDescription tile{rows.data, rows.dtype, 2};
    tile.sizes = {rows.sizes[1], rows.sizes[0]};
    tile.stride_bytes = {2, rows.strides[0] * 2};
    tile.box = {kBlockK, units * rows_per_unit};
    maps.by_units[units - 1] = device::encode_tensor_map(tile, name);
  }
  return maps;
}

}  // namespace

CUtensorMap weight_map_k_major(const ConstTensorView& weights, int box_channels, const char* name) {
  device::TileDescription tile{weights.data, weights.dtype, 3};
  tile.sizes = {weights.sizes[2], weights.sizes[1], weights.sizes[0]};
  tile.stride_bytes = {2, weights.strides[1] * 2, weights.strides[0] * 2};
  tile.box = {kBlockK, box_channels, 1};
  return device::encode_tensor_map(tile, name);
}

CUtensorMap weight_map_channel_major(const ConstTensorView& weights, int box_k, const char* name) {
  device::TileDescription tile{weights.data, weights.dtype, 4};
  tile.sizes = {64, weights.sizes[1], weights.sizes[2] / 64, weights.sizes[0]};
  tile.stride_bytes = {2, weights.strides[1] * 2, 128, weights.strides[0] * 2};
  tile.box = {64, box_k, kTileChannels / 64, 1};
  return device::encode_tensor_map(tile, name);
}

RowMaps input_maps(const ConstTensorView& rows, Sharing sharing, const char* name) {
  return row_maps(
      rows, sharing == Sharing::rows ? schedule::kRowsPerUnit / 2 : schedule::kRowsPerUnit, name);
}
RowMaps whole_tile_maps(const ConstTensorView& rows, const char* name) {
  return row_maps(rows, schedule::kRowsPerUnit, name);
}

// Sharing rows needs an even number of channel tiles, or a cluster's second CTA multiplies zeros;
// it also keeps row tiles large where experts have few rows. Otherwise sharing channels reads a
// tenth less from the L2.
Sharing choose_sharing(Sharing wanted, int num_channel_tiles) {
  if (wanted != Sharing::automatic) return wanted;
  return num_channel_tiles % kClusterSize == 0 ? Sharing::rows : Sharing::channels;
}

}  // namespace megamoe::products
