// How long a deadline can be.
#pragma once

#include <cmath>
#include <string>

#include "megamoe/error.h"

namespace megamoe {

/// Seconds, three years: longer deadlines are cut to it, or sums of times would overflow.
inline constexpr double kLongestWaitS = 1e8;

/// Throws Error(invalid_argument) with the argument's name unless it can be a deadline.
inline void require_deadline(const char* name, double seconds) {
  if (std::isfinite(seconds) && seconds > 0) return;
  throw Error(ErrorCode::invalid_argument, std::string(name) + " is " + std::to_string(seconds) +
                                               " s, must be positive and finite");
}

}  // namespace megamoe
