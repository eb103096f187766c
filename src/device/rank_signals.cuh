// Signals between ranks, a few a call: release and acquire over peer pointers, and waits that end.
//
// Unlike the counters of flags.cuh, which many CTAs add to, a signal word has one writer, a peer,
// and one reader. It is written with a release after a CTA barrier (or a kernel boundary) behind
// everything that it announces; it carries the call's epoch and whether the writer has failed. Only
// kernels of a single CTA wait: kernels of two ranks that share a GPU can then never keep each
// other from its SMs.
#pragma once

#include <cstdint>

#include "device/call_control.h"
#include "device/flags.cuh"

namespace megamoe::device {

__device__ inline void store_release_sys(SignalValue* signal, SignalValue value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(signal), "l"(value) : "memory");
}

__device__ inline SignalValue load_acquire_sys(const SignalValue* signal) {
  SignalValue value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(signal) : "memory");
  return value;
}

__device__ inline SignalValue signal_value(const CallControl& control) {
  return 2 * control.epoch + (control.failed_for_good != 0 ? kSenderFailed : 0);
}
__device__ inline std::uint64_t epoch_of(SignalValue value) { return value / 2; }

/// How a wait ended.
struct Arrival {
  FailureCode failure;  ///< none, deadline_exceeded or peer_failed
  SignalValue seen;
};

/// Waits until the signal has reached `epoch`, for at most `deadline_ns`, or until the host says
/// that its sender `has_left` (a word in pinned memory; may be null).
__device__ inline Arrival await_signal(const SignalValue* signal, std::uint64_t epoch,
                                       std::uint64_t deadline_ns, const std::uint32_t* has_left) {
  constexpr std::uint32_t kLooksBetweenWords = 1024;  // the host's memory is far away
  const std::uint64_t start = now_ns();
  bool is_last_look = false;
  for (std::uint32_t looks = 1;; ++looks) {
    const SignalValue seen = load_acquire_sys(signal);
    if (epoch_of(seen) >= epoch) {
      return {(seen & kSenderFailed) != 0 ? FailureCode::peer_failed : FailureCode::none, seen};
    }
    if (is_last_look) return {FailureCode::peer_failed, seen};
    if (now_ns() - start > deadline_ns) return {FailureCode::deadline_exceeded, seen};
    // A peer that has left may have sent its signal before: that is there by now.
    is_last_look = looks % kLooksBetweenWords == 0 && has_left != nullptr &&
                   acquire<Reach::system>(has_left) != 0;
  }
}

/// Keeps the first failure; one thread of a rank at a time may call it.
__device__ inline void report(volatile FailureRecord* record, const FailureRecord& failure) {
  if (record->is_set != 0) return;
  record->code = failure.code;
  record->rank = failure.rank;
  record->peer = failure.peer;
  record->awaited = failure.awaited;
  record->slot = failure.slot;
  record->value = failure.value;
  record->expected = failure.expected;
  record->seen = failure.seen;
  record->token = failure.token;
  record->need = failure.need;
  record->capacity = failure.capacity;
  __threadfence_system();
  record->is_set = 1;
}

}  // namespace megamoe::device
