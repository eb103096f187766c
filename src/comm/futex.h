// Waits on a word, between threads or between processes that share its memory. Nobody holds
// anything meanwhile: who dies or is forked leaves nothing locked.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <ctime>
#include <limits>

namespace megamoe {

/// Returns when the word is not `seen` any more, after `limit` (less than a second), or earlier.
inline void wait_while(const std::atomic<std::uint32_t>& word, std::uint32_t seen,
                       std::chrono::milliseconds limit) noexcept {
  const timespec timeout{0, limit.count() * 1'000'000};
  syscall(SYS_futex, &word, FUTEX_WAIT, seen, &timeout, nullptr, 0);
}

/// Ends all waits on the word.
inline void add_and_wake(std::atomic<std::uint32_t>& word) noexcept {
  word.fetch_add(1);
  syscall(SYS_futex, &word, FUTEX_WAKE, std::numeric_limits<int>::max(), nullptr, nullptr, 0);
}

}  // namespace megamoe
