// The only buffer map: what lies where in a rank's workspace, for every backend, on host and
// device.
//
// Legend: R ranks, T max tokens of a rank, H hidden, I intermediate, E experts, K slots, C row
// capacity.
#pragma once

#include <cstddef>
#include <cstdint>

#include "megamoe/bf16.h"
#include "routing/plan.h"

namespace megamoe {

/// The numbers that sizes follow from.
struct WorkspaceDims {
  RoutingDims routing;
  std::int64_t max_tokens = 0;
  std::int64_t hidden_dim = 0;
  std::int64_t intermediate_dim = 0;
  std::int64_t row_capacity = 0;
};

/// A buffer of T elements at a byte offset.
template <class T>
struct Region {
  std::int64_t offset = 0;
  std::int64_t count = 0;
  MEGAMOE_HOST_DEVICE T* in(std::byte* base) const { return reinterpret_cast<T*>(base + offset); }
};

/// Hands out offsets, each aligned for bulk copies and for any vector unit.
class RegionAllocator {
 public:
  explicit RegionAllocator(std::int64_t begin = 0) : next_(round_up(begin, kAlignment)) {}

  template <class T>
  Region<T> take(std::int64_t count) {
    const Region<T> region{next_, count};
    next_ = round_up(next_ + count * static_cast<std::int64_t>(sizeof(T)), kAlignment);
    return region;
  }
  [[nodiscard]] std::int64_t bytes() const { return next_; }

  static constexpr std::int64_t kAlignment = 256;

 private:
  std::int64_t next_;
};

/// dw sums p * a over I in segments of this width (a fixed tree each), then the segments in order.
inline constexpr std::int64_t kDweightSegment = 64;
constexpr std::int64_t num_dweight_segments(std::int64_t intermediate_dim) {
  return (intermediate_dim + kDweightSegment - 1) / kDweightSegment;
}

/// What peers read (staged rows, pull lists) or write (slots). "staged" means that the owner wrote
/// it this call.
struct SymmetricLayout {
  Region<bf16> staged_rows_TH;             ///< x in the forward pass, x again in the backward pass
  Region<bf16> staged_dy_TH;               ///< backward
  Region<float> staged_weights_TK;         ///< backward: w travels with dy
  Region<std::int64_t> destination_begin;  ///< PullLists, R + 1
  Region<PullToken> pull_tokens;
  Region<PullSlot> pull_slots;
  Region<bf16> slot_rows_TKH;  ///< o rows, or dx rows, written by the experts' ranks
  Region<float> slot_dweights_TK;
  std::int64_t bytes = 0;
};

/// What only the rank itself uses: rows in expert order.
struct LocalLayout {
  Region<bf16> x_CH;
  Region<bf16> dy_CH;
  Region<bf16> a_CI;   ///< a in the forward pass, w * a in the backward pass
  Region<bf16> dg_CI;  ///< gated activations only
  Region<bf16> du_CI;
  Region<RowOrigin> origin_C;
  Region<float> weight_C;
  Region<float> dweight_segments;  ///< [C, segments of I]
  std::int64_t bytes = 0;
};

/// The regions from byte `begin` on.
inline SymmetricLayout symmetric_layout(const WorkspaceDims& dims, std::int64_t begin = 0) {
  const std::int64_t rows = dims.max_tokens * dims.hidden_dim;
  const std::int64_t slots = dims.max_tokens * dims.routing.top_k;
  RegionAllocator regions(begin);
  SymmetricLayout layout;
  layout.staged_rows_TH = regions.take<bf16>(rows);
  layout.staged_dy_TH = regions.take<bf16>(rows);
  layout.staged_weights_TK = regions.take<float>(slots);
  layout.destination_begin = regions.take<std::int64_t>(dims.routing.num_ranks + 1);
  layout.pull_tokens = regions.take<PullToken>(max_pull_tokens(dims.routing, dims.max_tokens));
  layout.pull_slots = regions.take<PullSlot>(slots);
  layout.slot_rows_TKH = regions.take<bf16>(slots * dims.hidden_dim);
  layout.slot_dweights_TK = regions.take<float>(slots);
  layout.bytes = regions.bytes();
  return layout;
}

inline LocalLayout local_layout(const WorkspaceDims& dims, std::int64_t begin = 0) {
  const std::int64_t rows = dims.row_capacity;
  RegionAllocator regions(begin);
  LocalLayout layout;
  layout.x_CH = regions.take<bf16>(rows * dims.hidden_dim);
  layout.dy_CH = regions.take<bf16>(rows * dims.hidden_dim);
  layout.a_CI = regions.take<bf16>(rows * dims.intermediate_dim);
  layout.dg_CI = regions.take<bf16>(rows * dims.intermediate_dim);
  layout.du_CI = regions.take<bf16>(rows * dims.intermediate_dim);
  layout.origin_C = regions.take<RowOrigin>(rows);
  layout.weight_C = regions.take<float>(rows);
  layout.dweight_segments = regions.take<float>(rows * num_dweight_segments(dims.intermediate_dim));
  layout.bytes = regions.bytes();
  return layout;
}

}  // namespace megamoe
