// Tensor maps of the operands that several products have in common.
#pragma once

#include "device/tensor_map_cache.h"
#include "kernels/products/products.h"
#include "kernels/products/row_product.h"

namespace megamoe::products {

/// From `options.tensor_maps` where there are any.
CUtensorMap tensor_map(const LaunchOptions& options, const device::TileDescription& tile,
                       const char* name);

/// Weights [e, C, K], K contiguous: one copy brings 64 of K for `box_channels` channels.
CUtensorMap weight_map_k_major(const LaunchOptions& options, const ConstTensorView& weights,
                               int box_channels, const char* name);

/// Weights [e, K, C], channels contiguous, as sub-tiles of 64 channels: one copy brings
/// `box_channels` / 64 of them for `box_k` of K.
CUtensorMap weight_map_channel_major(const LaunchOptions& options, const ConstTensorView& weights,
                                     int box_k, const char* name, int box_channels = kTileChannels);

/// Row inputs [N, C]: 64 columns of a whole tile, or of the half that one CTA loads where the
/// cluster shares rows.
RowMaps input_maps(const LaunchOptions& options, const ConstTensorView& rows, Sharing sharing,
                   const char* name);

/// 64 columns of `num_rows` rows.
CUtensorMap row_map(const LaunchOptions& options, const ConstTensorView& rows, int num_rows,
                    const char* name);

/// Row outputs: 64 columns of a whole tile.
RowMaps whole_tile_maps(const LaunchOptions& options, const ConstTensorView& rows,
                        const char* name);

/// The heuristic behind Sharing::automatic, for the products over grouped rows.
Sharing choose_sharing(const LaunchOptions& options, int num_channel_tiles);

}  // namespace megamoe::products
