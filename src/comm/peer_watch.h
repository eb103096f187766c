// Watches whether the peers of a rank are still there, while the rank's own thread is elsewhere.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

#include "megamoe/communicator.h"

namespace megamoe {

/// A thread that looks at the group's departures() ten times a second. It touches nothing but host
/// memory: a call of CUDA could wait behind the very kernels that it is to end, or spoil a capture.
class PeerWatch {
 public:
  /// Word r becomes 1 once rank r has left, after all that it had sent. Group and words must
  /// outlive the watch, or its stop().
  PeerWatch(const Communicator& group, std::uint32_t* has_left_R);
  PeerWatch(const PeerWatch&) = delete;
  PeerWatch& operator=(const PeerWatch&) = delete;
  ~PeerWatch() { stop(); }

  /// What the word of a rank says, to any thread.
  [[nodiscard]] static bool has_left(const std::uint32_t* has_left_R, int rank) {
    auto& word = const_cast<std::uint32_t&>(has_left_R[rank]);  // an atomic_ref takes no const
    return std::atomic_ref(word).load(std::memory_order_acquire) != 0;
  }

  /// Returns when the thread has ended. May be called again.
  void stop() noexcept;

 private:
  const Communicator& group_;
  std::uint32_t* has_left_R_;
  std::int32_t process_;  ///< that the thread is of
  std::atomic<std::uint32_t> is_over_{0};
  std::unique_ptr<std::thread> thread_;  ///< null for a rank without peers
};

}  // namespace megamoe
