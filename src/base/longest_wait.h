// How long a deadline can be.
#pragma once

namespace megamoe {

/// Seconds, three years: longer deadlines are cut to it, or sums of times would overflow.
inline constexpr double kLongestWaitS = 1e8;

}  // namespace megamoe
