// A moment after which nobody waits any more.
#pragma once

#include <algorithm>
#include <chrono>

#include "base/longest_wait.h"

namespace megamoe::network {

class Deadline {
 public:
  explicit Deadline(double seconds)
      : seconds_(seconds),
        end_(Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                std::chrono::duration<double>(std::min(seconds, kLongestWaitS)))) {}

  [[nodiscard]] double seconds() const { return seconds_; }
  [[nodiscard]] bool has_passed() const { return Clock::now() >= end_; }
  /// For poll(): rounded up, so that a wait of 0 means that the deadline has passed.
  [[nodiscard]] int remaining_ms() const {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(end_ - Clock::now()).count();
    return static_cast<int>(std::clamp<decltype(left)>(left, 0, kLongestPollMs));
  }
  /// The earlier of this one and `seconds` from now.
  [[nodiscard]] Deadline at_most(double seconds) const {
    Deadline other(seconds);
    return other.end_ < end_ ? other : *this;
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr int kLongestPollMs = 1'000'000;
  double seconds_;
  Clock::time_point end_;
};

}  // namespace megamoe::network
