#include "comm/enqueue_order.h"

#include <algorithm>

namespace megamoe {

EnqueueOrder::EnqueueOrder(int num_ranks) : points_R_(num_ranks, 0) {}

void EnqueueOrder::reach(int rank, std::uint64_t point) {
  {
    const std::lock_guard lock(mutex_);
    points_R_[rank] = std::max(points_R_[rank], point);
  }
  reached_.notify_all();
}

EnqueueOrder::Meeting EnqueueOrder::await(std::uint64_t point, Seconds patience,
                                          const std::function<bool(int)>& has_left) {
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::milliseconds kBetweenQuestions{20};
  const Clock::time_point start = Clock::now();
  const auto missing_from = [&](int first) {
    const auto is_missing = [&](std::uint64_t reached) { return reached < point; };
    const auto found = std::find_if(points_R_.begin() + first, points_R_.end(), is_missing);
    return static_cast<int>(found - points_R_.begin());
  };
  const int num_ranks = static_cast<int>(points_R_.size());
  const auto all_there = [&] { return missing_from(0) == num_ranks; };
  std::unique_lock lock(mutex_);
  while (!reached_.wait_for(lock, kBetweenQuestions, all_there)) {
    if (Clock::now() - start >= patience) return Meeting::late;
    for (int rank = missing_from(0); rank < num_ranks; rank = missing_from(rank + 1)) {
      lock.unlock();
      const bool is_over = has_left(rank);
      lock.lock();
      if (is_over && points_R_[rank] < point) return Meeting::hopeless;
    }
  }
  return Meeting::complete;
}

}  // namespace megamoe
