// Checks the arguments of the weight gradients, describes their tiles to the copy engine and
// launches.
#include <string>

#include "device/cuda_check.h"
#include "kernels/products/entries.h"
#include "kernels/products/host_checks.h"
#include "kernels/products/host_maps.h"
#include "kernels/products/products.h"
#include "kernels/weight_gradients/gradient_storage.h"
#include "kernels/weight_gradients/weight_gradient_launch.h"
#include "megamoe/error.h"

namespace megamoe::products {
namespace {

// Rows [N, C] as blocks of 64 columns: one copy brings `num_blocks` blocks of `num_rows` rows.
CUtensorMap operand_map(const LaunchOptions& options, const ConstTensorView& rows, int num_rows,
                        int num_blocks, const char* name) {
  device::TileDescription tile{rows.data, rows.dtype, 3};
  tile.sizes = {kGradientBlock, rows.sizes[0], rows.sizes[1] / kGradientBlock};
  tile.stride_bytes = {2, rows.strides[0] * 2, kGradientBlock * 2};
  tile.box = {kGradientBlock, num_rows, num_blocks};
  return tensor_map(options, tile, name);
}

CUtensorMap gradient_map(const LaunchOptions& options, const TensorView& gradient, int num_blocks) {
  device::TileDescription tile{gradient.data, gradient.dtype};
  if (gradient.dtype == DType::bf16) {
    tile.num_dims = 3;
    tile.sizes = {gradient.sizes[2], gradient.sizes[1], gradient.sizes[0]};
    tile.stride_bytes = {2, gradient.strides[1] * 2, gradient.strides[0] * 2};
    tile.box = {kBlockChannels, num_blocks * kGradientBlock, 1};
  } else {
    constexpr int kLineElements = 32;
    tile.num_dims = 4;
    tile.sizes = {kLineElements, gradient.sizes[1], gradient.sizes[2] / kLineElements,
                  gradient.sizes[0]};
    tile.stride_bytes = {4, gradient.strides[1] * 4, kLineElements * 4, gradient.strides[0] * 4};
    tile.box = {kLineElements, num_blocks * kFp32LinesABlock,
                kGradientTileChannels<GradientType::fp32> / kLineElements, 1};
  }
  return tensor_map(options, tile, "gradient");
}

void check_gradient(const WeightGradient& job, const GroupedRows& rows, DType dtype,
                    GradientMode mode) {
  const TensorView& gradient = job.gradient_eRC;
  if (gradient.dtype != DType::bf16 && gradient.dtype != DType::fp32) {
    throw Error(ErrorCode::invalid_argument,
                "gradient: must be bf16 or fp32, is " + describe(gradient));
  }
  if (gradient.dtype != dtype)
    throw Error(ErrorCode::invalid_argument, "gradients of one call must have one dtype");
  if (mode == GradientMode::accumulate && dtype != DType::fp32) {
    throw Error(ErrorCode::invalid_argument,
                "gradient: accumulating needs fp32, is " + describe(gradient));
  }
  check_rows(job.lines_NR, job.lines_NR.sizes[0], gradient.sizes[1], "lines");
  check_rows(job.channels_NC, job.lines_NR.sizes[0], gradient.sizes[2], "channels");
  ConstTensorView shape = gradient;
  shape.dtype = DType::bf16;
  check_weights(shape, rows.num_groups, gradient.sizes[1], gradient.sizes[2], "gradient");
}

int tile_channels(GradientType type) {
  return type == GradientType::bf16 ? kGradientTileChannels<GradientType::bf16>
                                    : kGradientTileChannels<GradientType::fp32>;
}

GradientJob describe_job(const LaunchOptions& options, const WeightGradient& job, GradientType type,
                         Sharing sharing) {
  GradientJob described{};
  const bool rows_shared = sharing == Sharing::rows;
  described.channels = operand_map(options, job.channels_NC, rows_shared ? kBlockK : kBlockK / 2,
                                   tile_channels(type) / kGradientBlock, "channels");
  for (int blocks = 1; blocks <= kMaxBlocksPerTile; ++blocks) {
    described.lines[blocks - 1] =
        operand_map(options, job.lines_NR, rows_shared ? kBlockK / 2 : kBlockK, blocks, "lines");
    described.gradient[blocks - 1] = gradient_map(options, job.gradient_eRC, blocks);
  }
  described.num_channel_tiles = ceil_div(job.gradient_eRC.sizes[2], tile_channels(type));
  described.num_line_blocks = static_cast<int>(job.gradient_eRC.sizes[1] / kGradientBlock);
  return described;
}

// Sharing rows where every job has an even number of channel tiles: then no CTA multiplies zeros.
Sharing choose(Sharing wanted, GradientType type, std::span<const WeightGradient> gradients) {
  if (wanted != Sharing::automatic) return wanted;
  for (const WeightGradient& job : gradients) {
    if (ceil_div(job.gradient_eRC.sizes[2], tile_channels(type)) % kClusterSize != 0)
      return Sharing::channels;
  }
  return Sharing::rows;
}

}  // namespace

WeightGradientLaunch describe_weight_gradients(const GroupedRows& rows,
                                               std::span<const WeightGradient> gradients,
                                               GradientMode mode, const LaunchOptions& options,
                                               const std::uint32_t* cancelled) {
  if (gradients.empty() || gradients.size() > kMaxGradientJobs) {
    throw Error(ErrorCode::invalid_argument,
                "gradients: one to three a call, got " + std::to_string(gradients.size()));
  }
  check_groups(rows, "weight gradients");
  WeightGradientLaunch launch;
  const DType dtype = gradients.front().gradient_eRC.dtype;
  launch.type = dtype == DType::bf16 ? GradientType::bf16 : GradientType::fp32;
  launch.sharing = choose(options.sharing, launch.type, gradients);
  WeightGradientParams& params = launch.params;
  params.num_jobs = static_cast<int>(gradients.size());
  params.update = mode == GradientMode::accumulate ? GradientUpdate::add : GradientUpdate::store;
  params.cancelled = cancelled;
  params.rows = {rows.begin, rows.count, rows.num_groups};
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    check_gradient(gradients[i], rows, dtype, mode);
    params.jobs[i] = describe_job(options, gradients[i], launch.type, launch.sharing);
  }
  set_measured(params, options, device::ProductKind::weight_gradients);
  return launch;
}

void multiply_weight_gradients(const GroupedRows& rows, std::span<const WeightGradient> gradients,
                               GradientMode mode, const LaunchOptions& options,
                               const std::uint32_t* cancelled, std::uint32_t* num_tiles_taken) {
  WeightGradientLaunch launch =
      describe_weight_gradients(rows, gradients, mode, options, cancelled);
  if (num_tiles_taken != nullptr) {
    launch.params.num_tiles_taken = num_tiles_taken;
    cuda::check(cudaMemsetAsync(num_tiles_taken, 0, sizeof(*num_tiles_taken), options.stream),
                "cudaMemsetAsync of the counter of tiles");
  }
  const bool shares_rows = launch.sharing == Sharing::rows;
  const void* kernel = nullptr;
  if (launch.type == GradientType::bf16) {
    kernel =
        shares_rows ? weight_gradient_bf16_sharing_rows() : weight_gradient_bf16_sharing_channels();
  } else {
    kernel =
        shares_rows ? weight_gradient_fp32_sharing_rows() : weight_gradient_fp32_sharing_channels();
  }
  launch_clusters(kernel, {&launch.params}, options,
                  launch.type == GradientType::bf16 ? sizeof(GradientStorage<GradientType::bf16>)
                                                    : sizeof(GradientStorage<GradientType::fp32>));
}

}  // namespace megamoe::products
