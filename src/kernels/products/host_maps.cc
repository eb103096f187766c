#include "kernels/products/host_maps.h"

namespace megamoe::products {
namespace {

RowMaps row_maps(const LaunchOptions& options, const ConstTensorView& rows, int rows_per_unit,
                 const char* name) {
  RowMaps maps;
  for (int units = 1; units <= schedule::kMaxUnitsPerTile; ++units) {
    maps.by_units[units - 1] = row_map(options, rows, units * rows_per_unit, name);
  }
  return maps;
}

}  // namespace

CUtensorMap tensor_map(const LaunchOptions& options, const device::TileDescription& tile,
                       const char* name) {
  return options.tensor_maps != nullptr ? options.tensor_maps->encode(tile, name)
                                        : device::encode_tensor_map(tile, name);
}

CUtensorMap weight_map_k_major(const LaunchOptions& options, const ConstTensorView& weights,
                               int box_channels, const char* name) {
  device::TileDescription tile{weights.data, weights.dtype, 3};
  tile.sizes = {weights.sizes[2], weights.sizes[1], weights.sizes[0]};
  tile.stride_bytes = {2, weights.strides[1] * 2, weights.strides[0] * 2};
  tile.box = {kBlockK, box_channels, 1};
  return tensor_map(options, tile, name);
}

CUtensorMap weight_map_channel_major(const LaunchOptions& options, const ConstTensorView& weights,
                                     int box_k, const char* name, int box_channels) {
  device::TileDescription tile{weights.data, weights.dtype, 4};
  tile.sizes = {64, weights.sizes[1], weights.sizes[2] / 64, weights.sizes[0]};
  tile.stride_bytes = {2, weights.strides[1] * 2, 128, weights.strides[0] * 2};
  tile.box = {64, box_k, box_channels / 64, 1};
  return tensor_map(options, tile, name);
}

CUtensorMap row_map(const LaunchOptions& options, const ConstTensorView& rows, int num_rows,
                    const char* name) {
  device::TileDescription tile{rows.data, rows.dtype, 2};
  tile.sizes = {rows.sizes[1], rows.sizes[0]};
  tile.stride_bytes = {2, rows.strides[0] * 2};
  tile.box = {kBlockK, num_rows};
  return tensor_map(options, tile, name);
}
RowMaps input_maps(const LaunchOptions& options, const ConstTensorView& rows, Sharing sharing,
                   const char* name) {
  return row_maps(options, rows,
                  sharing == Sharing::rows ? schedule::kRowsPerUnit / 2 : schedule::kRowsPerUnit,
                  name);
}
RowMaps whole_tile_maps(const LaunchOptions& options, const ConstTensorView& rows,
                        const char* name) {
  return row_maps(options, rows, schedule::kRowsPerUnit, name);
}

Sharing choose_sharing(const LaunchOptions& options, int num_channel_tiles) {
  if (options.sharing != Sharing::automatic) return options.sharing;
  // Where a cluster shares rows, an odd last channel tile leaves its second CTA with zeros.
  if (num_channel_tiles % kClusterSize != 0) return Sharing::channels;
  // Sharing channels reads a tenth less from the L2 (measured 1-3% faster at 1,000 rows an expert),
  // but cuts an expert into an even number of row tiles: at 512 rows four of 128 instead of three
  // of 176, which cost 3-8%.
  constexpr double kLeastUnits = 9.5;
  const int units = schedule::num_row_units(options.expected_group_rows);
  if (units == 0) return Sharing::rows;
  const int tiles = schedule::num_unit_tiles(units, schedule::kMaxUnitsPerTile, kClusterSize);
  return static_cast<double>(units) / tiles >= kLeastUnits ? Sharing::channels : Sharing::rows;
}

}  // namespace megamoe::products
