#include <cmath>

#include "bench/cuda_rank_tensors.h"

namespace megamoe::bench {
namespace {

__device__ std::uint32_t mixed(std::uint64_t value) {
  value = (value ^ (value >> 31)) * 0x7fb5d329728ea185ULL;
  value = (value ^ (value >> 27)) * 0x81dadef4bc2dd44dULL;
  return static_cast<std::uint32_t>(value >> 32);
}

/// About normal (a sum of four uniform numbers), of standard deviation `scale`.
__global__ void fill_kernel(bf16* values, std::int64_t count, float scale, std::uint64_t seed) {
  const std::int64_t stride = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count;
       i += stride) {
    float sum = -2.0F;
    for (int term = 0; term < 4; ++term) {
      sum += static_cast<float>(mixed(seed * 0x9e3779b97f4a7c15ULL + i * 4 + term)) * 0x1p-32F;
    }
    values[i] = to_bf16(sum * scale * 1.7320508F);
  }
}

}  // namespace

void DeviceTensor::fill(float scale, std::uint64_t seed) {
  fill_kernel<<<1024, 256>>>(reinterpret_cast<bf16*>(memory_.data()), count_, scale, seed);
  cuda::check(cudaGetLastError(), "fill");
}

RankTensors::RankTensors(const LayerConfig& config, int num_ranks, int rank, int device,
                         const std::vector<std::int32_t>& ids)
    : T(config.shape.max_tokens),
      H(config.shape.hidden_dim),
      I(config.shape.intermediate_dim),
      K(config.shape.top_k),
      e(config.shape.num_experts / num_ranks),
      stores_bf16(config.weight_gradient_mode == WeightGradientMode::store_bf16),
      x(device, T * H, 2),
      dy(device, T * H, 2),
      y(device, T * H, 2),
      dx(device, T * H, 2),
      ids_TK(device, T * K, 4),
      weights(device, T * K, 4),
      dweights(device, T * K, 4),
      gate(device, e * I * H, 2),
      up(device, e * I * H, 2),
      down(device, e * I * H, 2),
      dgate(device, e * I * H, stores_bf16 ? 2 : 4),
      dup(device, e * I * H, stores_bf16 ? 2 : 4),
      ddown(device, e * I * H, stores_bf16 ? 2 : 4) {
  const auto seed = static_cast<std::uint64_t>(rank) * 16;
  x.fill(1.0F, seed + 1);
  dy.fill(1.0F, seed + 2);
  gate.fill(1.0F / std::sqrt(static_cast<float>(H)), seed + 3);
  up.fill(1.0F / std::sqrt(static_cast<float>(H)), seed + 4);
  down.fill(1.0F / std::sqrt(static_cast<float>(I)), seed + 5);
  ids_TK.upload(ids);
  weights.upload(std::vector<float>(T * K, 1.0F / static_cast<float>(K)));
  cuda::check(cudaDeviceSynchronize(), "a benchmark's tensors");
}

}  // namespace megamoe::bench
