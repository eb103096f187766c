// How a rank's experts are cut into groups of neighbours that are computed one after the other:
// shared by the host, the kernels and the CPU tests.
//
// The first and the last group are half as large as the others: the first one's tokens and the last
// one's results are what nothing hides, and of all others there should be few, because each has its
// launches and messages.
//
// Legend: e experts of a rank, G groups, from 1 to e.
#pragma once

#include <cstdint>

#include "megamoe/bf16.h"  // MEGAMOE_HOST_DEVICE

namespace megamoe::schedule {

struct ExpertGroups {
  std::int32_t num_experts = 0;  ///< e
  std::int32_t num_groups = 1;   ///< G

  /// The first expert of a group; e for group G. No group is empty.
  [[nodiscard]] MEGAMOE_HOST_DEVICE constexpr std::int32_t begin(std::int32_t group) const {
    if (group == 0) return 0;
    if (group == num_groups) return num_experts;
    // e (group - 1/2) / (G - 1), rounded.
    const std::int32_t whole = num_groups - 1;
    return (num_experts * (2 * group - 1) + whole) / (2 * whole);
  }
  [[nodiscard]] MEGAMOE_HOST_DEVICE constexpr std::int32_t group_of(std::int32_t expert) const {
    const std::int32_t whole = num_groups - 1;
    return ((2 * expert + 1) * whole + num_experts - 1) / num_experts / 2;
  }
  [[nodiscard]] MEGAMOE_HOST_DEVICE constexpr std::int32_t size(std::int32_t group) const {
    return begin(group + 1) - begin(group);
  }
};

}  // namespace megamoe::schedule
