#include "device/tensor_map_cache.h"

#include <cstdint>

namespace megamoe::device {

std::size_t TensorMapCache::Hash::operator()(const TileDescription& tile) const {
  std::uint64_t hash = reinterpret_cast<std::uintptr_t>(tile.data);
  const auto mix = [&](std::uint64_t value) {
    constexpr std::uint64_t kOdd = 0x9e3779b97f4a7c15;  // 2^64 / golden ratio (Knuth, 6.4)
    hash = (hash ^ value) * kOdd;
    hash ^= hash >> 29;
  };
  mix(static_cast<std::uint64_t>(tile.dtype));
  for (int dim = 0; dim < tile.num_dims; ++dim) {
    mix(static_cast<std::uint64_t>(tile.sizes[dim]));
    mix(static_cast<std::uint64_t>(tile.stride_bytes[dim]));
    mix(static_cast<std::uint64_t>(tile.box[dim]));
  }
  return hash;
}

const CUtensorMap& TensorMapCache::encode(const TileDescription& tile, const char* what) {
  const auto found = maps_.find(tile);
  if (found != maps_.end()) return found->second;
  if (maps_.size() >= kMaxMaps) maps_.clear();
  return maps_.emplace(tile, encode_tensor_map(tile, what)).first->second;
}

}  // namespace megamoe::device
