#include "trace/timeline.h"

#include <algorithm>
#include <array>

namespace megamoe::timeline {
namespace {

using trace::BlockLog;
using trace::Record;

/// Microseconds of an SM's clock within one CTA, from the CTA's two anchors.
class ClockScale {
 public:
  ClockScale(const BlockLog& log, std::uint64_t origin_ns)
      : begin_us_(static_cast<double>(static_cast<std::int64_t>(log.begin_ns - origin_ns)) * 1e-3),
        duration_us_(static_cast<double>(log.end_ns - log.begin_ns) * 1e-3),
        begin_clock_(log.begin_clock),
        num_cycles_(log.end_clock - log.begin_clock) {}

  [[nodiscard]] double duration_us(std::uint32_t cycles) const {
    return num_cycles_ == 0 ? 0.0 : duration_us_ * cycles / num_cycles_;
  }
  /// The low halves of clocks are subtracted: a kernel takes less than 2^32 cycles.
  [[nodiscard]] double at_us(std::uint32_t clock) const {
    return begin_us_ + duration_us(clock - begin_clock_);
  }
  [[nodiscard]] double end_us() const { return begin_us_ + duration_us_; }
  [[nodiscard]] double ghz() const {
    return duration_us_ == 0.0 ? 0.0 : num_cycles_ / duration_us_ * 1e-3;
  }

 private:
  double begin_us_;
  double duration_us_;
  std::uint32_t begin_clock_;
  std::uint32_t num_cycles_;
};

Span decode(const Record& record, const ClockScale& scale) {
  return {record.event,
          scale.at_us(record.begin),
          scale.at_us(record.end),
          scale.duration_us(record.waited),
          scale.duration_us(record.first_waited),
          record.group,
          record.num_units,
          record.num_k_blocks};
}

/// Which role it was that left these spans.
std::string role_name(device::ProductKind product, int track, const std::vector<Span>& spans) {
  if (spans.empty()) return {};
  if (track >= trace::track_math_0) return "math " + std::to_string(track - trace::track_math_0);
  switch (spans.front().event) {
    case Event::pulls:
    case Event::awaits_copies:
      return product == device::ProductKind::weight_gradients ? "pull, reduce" : "pull";
    case Event::awaits_gradients:
    case Event::reduces:
      return "reduce";
    case Event::pushes:
      return "push " + std::to_string(track - trace::track_warp_1);
    case Event::stores:
      return product == device::ProductKind::gate_up_gradient
                 ? "store"
                 : "store " + std::to_string(track - trace::track_warp_1);
    default:
      return track == trace::track_warp_0 ? "load" : "load g, u";
  }
}

}  // namespace

std::string_view to_string(Event event) {
  static constexpr std::array<std::string_view, trace::kNumEvents> kNames = {"main loop",
                                                                             "epilogue",
                                                                             "awaits turn",
                                                                             "awaits buffers",
                                                                             "other CTA's tile",
                                                                             "awaits rows",
                                                                             "load",
                                                                             "store",
                                                                             "push",
                                                                             "pull",
                                                                             "awaits copies",
                                                                             "awaits gradients",
                                                                             "reduce"};
  const auto idx = static_cast<std::size_t>(event);
  return idx < kNames.size() ? kNames[idx] : "unknown";
}

std::string_view to_string(device::ProductKind product) {
  switch (product) {
    case device::ProductKind::gate_up:
      return "gate_up";
    case device::ProductKind::down:
      return "down";
    case device::ProductKind::gate_up_gradient:
      return "p";
    case device::ProductKind::dx:
      return "dx";
    case device::ProductKind::weight_gradients:
      return "weight_gradients";
  }
  return "unknown";
}

double KernelRun::begin_us() const {
  double first = blocks.empty() ? 0.0 : blocks.front().begin_us;
  for (const Block& block : blocks) first = std::min(first, block.begin_us);
  return first;
}

double KernelRun::end_us() const {
  double last = 0.0;
  for (const Block& block : blocks) last = std::max(last, block.end_us);
  return last;
}

KernelRun decode(device::ProductKind product, const trace::BlockLog* blocks, int num_blocks,
                 std::uint64_t origin_ns) {
  KernelRun run{std::string(to_string(product)), {}};
  for (int block_idx = 0; block_idx < num_blocks; ++block_idx) {
    const BlockLog& log = blocks[block_idx];
    if (log.begin_ns == 0) continue;
    const ClockScale scale(log, origin_ns);
    Block block{log.sm, scale.at_us(log.begin_clock), scale.end_us(), scale.ghz(), {}};
    for (int track = 0; track < trace::kNumTracks; ++track) {
      Role role;
      const std::uint32_t num_kept = std::min(log.num_records[track], trace::kMaxRecords);
      role.num_lost = log.num_records[track] - num_kept;
      for (std::uint32_t i = 0; i < num_kept; ++i) {
        role.spans.push_back(decode(log.records[track][i], scale));
      }
      role.name = role_name(product, track, role.spans);
      block.roles.push_back(std::move(role));
    }
    run.blocks.push_back(std::move(block));
  }
  return run;
}

}  // namespace megamoe::timeline
