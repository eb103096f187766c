// Recording what a role does when, a line a span, in builds with MEGAMOE_TRACE. In all others the
// classes here are empty, Recorder::wait is device::wait, and kernels compile to the same machine
// code as without them (docs/tracing.md says how that is checked).
#pragma once

#include <cstdint>

#include "device/barrier.cuh"
#include "device/flags.cuh"
#include "trace/region.h"

namespace megamoe::trace {

#ifdef MEGAMOE_TRACE

__device__ inline std::uint32_t clock_now() {
  std::uint32_t clock;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(clock)::"memory");
  return clock;
}

/// One for each role of a CTA, used by all of the role's threads; thread 0 of the role writes.
/// Where it writes is worked out at each span: an address would occupy registers that the load warp
/// lacks.
class Recorder {
 public:
  __device__ Recorder(const Region& region, int track, int thread)
      : region_(region), track_(track), writes_(thread == 0 && region.blocks != nullptr) {}
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;
  __device__ ~Recorder() {
    if (writes_) log().num_records[track_] = count_;
  }

  /// device::wait, added to the present span's waiting time.
  __device__ void wait(std::uint32_t barrier, std::uint32_t parity) {
    const std::uint32_t begin = clock_now();
    device::wait(barrier, parity);
    waited_ += clock_now() - begin;
  }
  /// The same, for the span's K block `k_block`: until the first has arrived nothing is multiplied.
  __device__ void wait_for_block(int k_block, std::uint32_t barrier, std::uint32_t parity) {
    wait(barrier, parity);
    if (k_block == 0) first_waited_ = waited_;
  }

 private:
  friend class Span;

  [[nodiscard]] __device__ BlockLog& log() const { return region_.blocks[blockIdx.x]; }
  /// Null where nothing is to be written.
  [[nodiscard]] __device__ Record* present() const {
    return writes_ && count_ < kMaxRecords ? &log().records[track_][count_] : nullptr;
  }

  const Region& region_;
  int track_;
  bool writes_;
  std::uint32_t count_ = 0;
  std::uint32_t waited_ = 0;
  std::uint32_t first_waited_ = 0;
};

/// From here to the end of the scope; one at a time for a recorder. What is known at its beginning
/// is written then, for the same reason.
class Span {
 public:
  __device__ Span(Recorder& recorder, Event event, int group = 0, int num_units = 0,
                  int num_k_blocks = 0)
      : recorder_(recorder) {
    recorder.waited_ = 0;
    recorder.first_waited_ = 0;
    if (Record* record = recorder.present()) {
      record->event = event;
      record->group = static_cast<std::uint16_t>(group);
      record->num_units = static_cast<std::uint8_t>(num_units);
      record->num_k_blocks = static_cast<std::uint16_t>(min(num_k_blocks, 65535));
      record->begin = clock_now();
    }
  }
  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;
  __device__ ~Span() {
    if (Record* record = recorder_.present()) {
      record->end = clock_now();
      record->waited = recorder_.waited_;
      record->first_waited = recorder_.first_waited_;
    }
    ++recorder_.count_;
  }

 private:
  Recorder& recorder_;
};

/// The CTA's own line: from its first instruction to its last.
class Block {
 public:
  __device__ explicit Block(const Region& region) : region_(region) {
    if (threadIdx.x != 0 || region.blocks == nullptr) return;
    BlockLog& log = region.blocks[blockIdx.x];
    asm volatile("mov.u32 %0, %%smid;" : "=r"(log.sm));
    log.begin_ns = device::now_ns();
    log.begin_clock = clock_now();
  }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  __device__ ~Block() {
    if (threadIdx.x != 0 || region_.blocks == nullptr) return;
    BlockLog& log = region_.blocks[blockIdx.x];
    log.end_ns = device::now_ns();
    log.end_clock = clock_now();
  }

 private:
  const Region& region_;
};

#else

class Recorder {
 public:
  __device__ Recorder(const Region& /*region*/, int /*track*/, int /*thread*/) {}
  __device__ void wait(std::uint32_t barrier, std::uint32_t parity) {
    device::wait(barrier, parity);
  }
  __device__ void wait_for_block(int /*k_block*/, std::uint32_t barrier, std::uint32_t parity) {
    device::wait(barrier, parity);
  }
};

class Span {
 public:
  __device__ Span(Recorder& /*recorder*/, Event /*event*/, int /*group*/ = 0, int /*num_units*/ = 0,
                  int /*num_k_blocks*/ = 0) {}
};

class Block {
 public:
  __device__ explicit Block(const Region& /*region*/) {}
};

#endif

}  // namespace megamoe::trace
