#include "comm/peer_watch.h"

#include <unistd.h>

#include <chrono>
#include <exception>

#include "comm/futex.h"

namespace megamoe {

PeerWatch::PeerWatch(const Communicator& group, std::uint32_t* has_left_R)
    : group_(group), has_left_R_(has_left_R), process_(getpid()) {
  if (group.size() == 1) return;
  thread_ = std::make_unique<std::thread>([this] {
    constexpr std::chrono::milliseconds kBetweenLooks{100};
    while (is_over_.load() == 0) {
      try {
        for (const Departure& departure : group_.departures()) {
          std::atomic_ref(has_left_R_[departure.rank]).store(1, std::memory_order_release);
        }
      } catch (const std::exception&) {
        // Out of memory; there may be some at the next look.
      }
      wait_while(is_over_, 0, kBetweenLooks);
    }
  });
}

void PeerWatch::stop() noexcept {
  if (thread_ == nullptr) return;
  if (process_ != getpid()) {
    static_cast<void>(thread_.release());  // a forked child has no such thread to join
    return;
  }
  add_and_wake(is_over_);
  thread_->join();
  thread_.reset();
}

}  // namespace megamoe
