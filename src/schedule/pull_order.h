// In what order a rank pulls the tokens of all sources while products already run. Shared by the
// kernels' roles and the CPU tests.
//
// Products walk the experts in order, so a token's turn is that of the first expert that needs it.
// Within an expert's turn the sources take turns, one token each, the rank itself first: own memory
// and every peer's link are then read at the same time, and all sources' rows of an expert are
// complete at about the same time. Each source's list is already in this order (routing/plan.h).
//
// Legend: e experts of the rank, s a source.
#pragma once

#include <cstdint>

#include "megamoe/bf16.h"  // MEGAMOE_HOST_DEVICE

namespace megamoe::schedule {

/// Sources in the order of their turns: the rank itself, then the ranks after it.
MEGAMOE_HOST_DEVICE constexpr int source_turn(int num_ranks, int rank, int source) {
  const int turn = source - rank;
  return turn < 0 ? turn + num_ranks : turn;
}

/// The lists of all sources for one rank. begin(s, i), i in [0, e], is where the tokens of source s
/// begin that need expert i first, counted from anywhere; begin(s, e) is their end.
template <class Begin>
class PullOrder {
 public:
  MEGAMOE_HOST_DEVICE constexpr PullOrder(int num_ranks, int rank, int num_experts, Begin begin)
      : num_ranks_(num_ranks), rank_(rank), num_experts_(num_experts), begin_(begin) {}

  [[nodiscard]] MEGAMOE_HOST_DEVICE constexpr int num_tokens_of(int source) const {
    return begin_(source, num_experts_) - begin_(source, 0);
  }
  [[nodiscard]] MEGAMOE_HOST_DEVICE constexpr int num_tokens() const {
    int sum = 0;
    for (int source = 0; source < num_ranks_; ++source) sum += num_tokens_of(source);
    return sum;
  }

  /// The first expert that needs token `token_idx` of the source's list.
  [[nodiscard]] MEGAMOE_HOST_DEVICE constexpr int expert_of(int source, int token_idx) const {
    int low = 0;
    int high = num_experts_ - 1;
    const int place = begin_(source, 0) + token_idx;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (begin_(source, middle + 1) > place) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    return low;
  }

  /// When the token is pulled: a number in [0, num_tokens()), another one for each token.
  [[nodiscard]] MEGAMOE_HOST_DEVICE constexpr int place_of(int source, int token_idx) const {
    const int expert = expert_of(source, token_idx);
    const int round = begin_(source, 0) + token_idx - begin_(source, expert);
    const int turn = source_turn(num_ranks_, rank_, source);
    int place = 0;
    for (int other = 0; other < num_ranks_; ++other) {
      const int num_others = begin_(other, expert + 1) - begin_(other, expert);
      place += begin_(other, expert) - begin_(other, 0);
      place += num_others < round ? num_others : round;
      if (num_others > round && source_turn(num_ranks_, rank_, other) < turn) ++place;
    }
    return place;
  }

 private:
  int num_ranks_;
  int rank_;
  int num_experts_;
  Begin begin_;
};

}  // namespace megamoe::schedule
