// A recorded pass as plain data: what each role of each SM did, in microseconds.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "device/call_control.h"
#include "trace/log.h"

namespace megamoe::timeline {

using trace::Event;

/// A name for people: "main loop".
std::string_view to_string(Event event);
std::string_view to_string(device::ProductKind product);

struct Span {
  Event event = Event::main_loop;
  double begin_us = 0.0;
  double end_us = 0.0;
  double waited_us = 0.0;        ///< of it, on barriers
  double first_waited_us = 0.0;  ///< main loops: of that, for the first operands
  int group = 0;                 ///< expert of the rank
  int num_units = 0;             ///< of 16 rows
  int num_k_blocks = 0;          ///< of 64
};

/// What one role of a CTA did, in order; spans do not overlap.
struct Role {
  std::string name;  ///< "load", "math 0"; empty: the kernel gives this warp nothing to do
  std::vector<Span> spans;
  std::int64_t num_lost = 0;  ///< spans for which there was no room
};

/// One CTA, which has an SM to itself.
struct Block {
  std::uint32_t sm = 0;
  double begin_us = 0.0;
  double end_us = 0.0;
  double clock_ghz = 0.0;  ///< of its SM, on average
  std::vector<Role> roles;
};

struct KernelRun {
  std::string name;
  std::vector<Block> blocks;

  [[nodiscard]] double begin_us() const;  ///< of the first CTA
  [[nodiscard]] double end_us() const;    ///< of the last
};

/// Between two points of the stream: kernels and the gaps before them.
struct Stage {
  std::string name;
  double begin_us = 0.0;
  double end_us = 0.0;
};

struct GpuTimeline {
  int rank = 0;
  std::vector<Stage> stages;
  std::vector<KernelRun> kernels;
};

/// What a launch left, with times since `origin_ns` of the device's global timer. CTAs that did not
/// run are left out.
KernelRun decode(device::ProductKind product, const trace::BlockLog* blocks, int num_blocks,
                 std::uint64_t origin_ns);

}  // namespace megamoe::timeline
