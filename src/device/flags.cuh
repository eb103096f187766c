// Counters in global memory by which CTAs and GPUs tell each other what is complete, and waits on
// them with a deadline.
//
// A counter changes only by red and only upwards: a plain store would break the release chain. What
// a counter stands for and which proxy fence belongs on each side is the memory protocol of the
// kernel that uses it.
#pragma once

#include <cstdint>

#include "device/call_control.h"

namespace megamoe::device {

enum class Reach { gpu, system };  ///< who may read the counter: CTAs of this GPU, or peers too

/// Adds to the counter; every earlier write of this thread (and those it has synchronised with) is
/// visible to who acquires the sum.
template <Reach reach>
__device__ inline void signal(std::uint32_t* counter, std::uint32_t amount = 1) {
  if constexpr (reach == Reach::gpu) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(amount) : "memory");
  } else {
    asm volatile("red.release.sys.global.add.u32 [%0], %1;" ::"l"(counter), "r"(amount) : "memory");
  }
}

template <Reach reach>
__device__ inline std::uint32_t acquire(const std::uint32_t* counter) {
  std::uint32_t value;
  if constexpr (reach == Reach::gpu) {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  } else {
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  }
  return value;
}

/// Four counters by one load, each acquired; 16-byte aligned.
__device__ inline void acquire_four(const std::uint32_t* counters, std::uint32_t (&values)[4]) {
  asm volatile("ld.acquire.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(values[0]), "=r"(values[1]), "=r"(values[2]), "=r"(values[3])
               : "l"(counters)
               : "memory");
}

__device__ inline std::uint64_t now_ns() {
  std::uint64_t time;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
  return time;
}

/// This CTA has done its part of a product; by one thread. Nothing is waited for. Null: nobody
/// measures.
__device__ inline void note_end(ProductEnds* ends) {
  if (ends == nullptr) return;
  const std::uint64_t now = now_ns();
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(&ends->sum_ns), "l"(now)
               : "memory");
  asm volatile("red.relaxed.gpu.global.max.u64 [%0], %1;" ::"l"(&ends->last_ns), "l"(now)
               : "memory");
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(&ends->num_ctas), "l"(1ULL)
               : "memory");
}

/// What a wait was about, for the report of a missed deadline.
struct Awaited {
  std::int32_t rank;
  std::int32_t peer;
  std::int32_t what;   ///< an enum of the kernel's
  std::int32_t block;  ///< of rows, or -1
};

/// The first missed deadline; lies in pinned host memory, so that the host reads it without a
/// synchronisation.
struct DeadlineReport {
  std::uint32_t set;  ///< 0 until the other members are written
  Awaited awaited;
  std::uint32_t expected;
  std::uint32_t seen;
  std::uint32_t claimed;  ///< taken by the thread that reports
};

__device__ inline void report_deadline(DeadlineReport* report, const Awaited& awaited,
                                       std::uint32_t expected, std::uint32_t seen) {
  if (atomicCAS_system(&report->claimed, 0U, 1U) != 0U) return;
  report->awaited = awaited;
  report->expected = expected;
  report->seen = seen;
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(&report->set), "r"(1U) : "memory");
}

/// Waits until the counter has reached `expected` (modulo 2^32, at most 2^31 ahead). On a missed
/// deadline reports and returns false; the caller falls through to its exit path, it never returns
/// early from between wgmmas and never traps.
template <Reach reach>
__device__ inline bool wait_for(const std::uint32_t* counter, std::uint32_t expected,
                                std::uint64_t deadline_ns, const Awaited& awaited,
                                DeadlineReport* report) {
  std::uint32_t seen = acquire<reach>(counter);
  if (static_cast<std::int32_t>(seen - expected) >= 0) return true;
  const std::uint64_t start = now_ns();
  while (static_cast<std::int32_t>(seen - expected) < 0) {
    if (now_ns() - start > deadline_ns) {
      report_deadline(report, awaited, expected, seen);
      return false;
    }
    seen = acquire<reach>(counter);
  }
  return true;
}

}  // namespace megamoe::device
