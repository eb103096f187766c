// Tensor maps that were encoded before. A layer's calls describe the same tiles again and again, a
// hundred and more in a step, and the driver takes microseconds for each.
#pragma once

#include <cstddef>
#include <unordered_map>

#include "device/tensor_map.h"

namespace megamoe::device {

/// A map holds nothing but its description's numbers, so it may outlive the memory that it
/// describes. One thread at a time.
class TensorMapCache {
 public:
  /// As encode_tensor_map(). The reference is valid until the next call.
  const CUtensorMap& encode(const TileDescription& tile, const char* what);

  /// Beyond it the cache starts anew: memory that is allocated anew at every step must not fill it.
  static constexpr std::size_t kMaxMaps = 2048;
  [[nodiscard]] std::size_t size() const { return maps_.size(); }

 private:
  struct Hash {
    std::size_t operator()(const TileDescription& tile) const;
  };
  std::unordered_map<TileDescription, CUtensorMap, Hash> maps_;
};

}  // namespace megamoe::device
