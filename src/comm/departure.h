// How groups of this host's ranks tell who has left: in which words, in which order.
#pragma once

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "megamoe/communicator.h"
#include "megamoe/error.h"

namespace megamoe {

inline std::string has_left_text(int rank, const std::string& reason) {
  return "rank " + std::to_string(rank) + " has left (" + reason + ")";
}

/// What has_left_text() says about the first of several ranks that left because of each other:
/// `reason`, a rank's own words, may begin with it.
inline std::string first_cause_text(int rank, const std::string& reason) {
  constexpr std::string_view kRank = "rank ";
  constexpr std::string_view kHasLeft = " has left (";
  const std::size_t after_number = reason.find_first_not_of("0123456789", kRank.size());
  if (!reason.starts_with(kRank) || after_number == kRank.size() ||
      after_number == std::string::npos ||
      reason.compare(after_number, kHasLeft.size(), kHasLeft)) {
    return has_left_text(rank, reason);
  }
  int depth = 0;
  for (std::size_t i = after_number; i < reason.size(); ++i) {
    depth += reason[i] == '(' ? 1 : reason[i] == ')' ? -1 : 0;
    if (reason[i] == ')' && depth == 0) return reason.substr(0, i + 1);
  }
  return reason;  // cut off where its record ended
}

/// As Communicator::departures() of `rank`. `order_of(peer)` is 1 for the first that left, 0 while
/// a peer takes part; `text_of(peer)` says how it left. With `broken`, why nobody can take part any
/// more, all peers have left.
template <class OrderOf, class TextOf>
std::vector<Departure> departures_of_peers(int rank, int num_ranks, const std::string& broken,
                                           const OrderOf& order_of, const TextOf& text_of) {
  std::vector<std::pair<int, int>> departed;  // order, rank
  for (int peer = 0; peer < num_ranks; ++peer) {
    if (peer == rank) continue;
    const int order = order_of(peer);
    if (order > 0 || !broken.empty()) departed.emplace_back(order, peer);
  }
  std::ranges::sort(departed);
  std::vector<Departure> departures;
  for (const auto& [order, peer] : departed) {
    departures.push_back({peer, broken.empty() ? Error(ErrorCode::peer_failed, text_of(peer))
                                               : Error(ErrorCode::deadline_exceeded, broken)});
  }
  return departures;
}

}  // namespace megamoe
