// Where a launch records: a member of the parameters of every product's kernel.
#pragma once

#include <cstdint>

#include "device/call_control.h"
#include "trace/log.h"

namespace megamoe::trace {

#ifdef MEGAMOE_TRACE

/// One launch's part of the log.
struct Region {
  BlockLog* blocks = nullptr;  ///< [grid]; null: the launch is not recorded
};

/// Hands out regions, one a launch.
class Launches {
 public:
  Launches() = default;
  /// `blocks` is device memory of max_launches x blocks_per_launch, zeroed.
  Launches(BlockLog* blocks, int max_launches, int blocks_per_launch)
      : blocks_(blocks), max_launches_(max_launches), blocks_per_launch_(blocks_per_launch) {}

  Region next(device::ProductKind product) {
    if (num_launches_ == max_launches_) return {};
    products_[num_launches_] = product;
    return {blocks_ + std::int64_t{num_launches_++} * blocks_per_launch_};
  }
  [[nodiscard]] int size() const { return num_launches_; }
  [[nodiscard]] device::ProductKind product(int launch) const { return products_[launch]; }

  static constexpr int kMaxLaunches = 8;

 private:
  BlockLog* blocks_ = nullptr;
  int max_launches_ = 0;
  int blocks_per_launch_ = 0;
  int num_launches_ = 0;
  device::ProductKind products_[kMaxLaunches] = {};
};

inline Region next_region(Launches* launches, device::ProductKind product) {
  return launches == nullptr ? Region{} : launches->next(product);
}

#else

// Nothing records. An empty member at the end of a kernel's parameters takes bytes that their
// alignment leaves unused.
struct Region {};
class Launches {};
inline Region next_region(Launches* /*launches*/, device::ProductKind /*product*/) { return {}; }

#endif

}  // namespace megamoe::trace
