// How every kind of group words that a rank has left.
#pragma once

#include <string>

namespace megamoe {

inline std::string has_left_text(int rank, const std::string& reason) {
  return "rank " + std::to_string(rank) + " has left (" + reason + ")";
}

}  // namespace megamoe
