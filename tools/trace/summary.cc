#include "trace/summary.h"

#include <algorithm>
#include <cstdio>

namespace megamoe::timeline {
namespace {

struct Interval {
  double begin;
  double end;
};
using Intervals = std::vector<Interval>;

/// Sorted, without overlaps.
Intervals merged(Intervals intervals) {
  std::sort(intervals.begin(), intervals.end(),
            [](const Interval& a, const Interval& b) { return a.begin < b.begin; });
  Intervals result;
  for (const Interval& interval : intervals) {
    if (!result.empty() && interval.begin <= result.back().end) {
      result.back().end = std::max(result.back().end, interval.end);
    } else {
      result.push_back(interval);
    }
  }
  return result;
}

double length(const Intervals& merged_intervals) {
  double sum = 0.0;
  for (const Interval& interval : merged_intervals) sum += interval.end - interval.begin;
  return sum;
}

/// The part of `a` that lies outside of `b`; both merged.
Intervals without(const Intervals& a, const Intervals& b) {
  Intervals result;
  for (const Interval& interval : a) {
    double begin = interval.begin;
    for (const Interval& cut : b) {
      if (cut.end <= begin || cut.begin >= interval.end) continue;
      if (cut.begin > begin) result.push_back({begin, cut.begin});
      begin = std::max(begin, cut.end);
    }
    if (begin < interval.end) result.push_back({begin, interval.end});
  }
  return result;
}

Intervals of_event(const Block& block, Event event) {
  Intervals intervals;
  for (const Role& role : block.roles) {
    for (const Span& span : role.spans) {
      if (span.event != event) continue;
      const double skipped = event == Event::main_loop ? span.first_waited_us : 0.0;
      intervals.push_back({span.begin_us + skipped, span.end_us});
    }
  }
  return merged(std::move(intervals));
}

/// A warpgroup's 128 channels x 16 rows x 64 of K, at 4096 FLOP a cycle and SM.
constexpr double kCyclesAUnit = 2.0 * 128 * 16 * 64 / 4096;

double full_rate_us(const Block& block) {
  double cycles = 0.0;
  for (const Role& role : block.roles) {
    for (const Span& span : role.spans) {
      if (span.event == Event::main_loop)
        cycles += kCyclesAUnit * span.num_units * span.num_k_blocks;
    }
  }
  return block.clock_ghz == 0.0 ? 0.0 : cycles / block.clock_ghz * 1e-3;
}

/// Not of the kernel's own tiles: rows are pulled for later kernels too, and summed for none.
bool is_of_rows(Event event) {
  return event == Event::pulls || event == Event::awaits_copies ||
         event == Event::awaits_gradients || event == Event::reduces;
}

/// Adds what the SM's tensor cores did between `begin_us` and `end_us` to the sums.
void add_block(const Block& block, double begin_us, double end_us, KernelSummary& sums) {
  const Intervals loops = of_event(block, Event::main_loop);
  sums.at_full_rate += full_rate_us(block);
  if (loops.empty()) {
    sums.start += end_us - begin_us;
    return;
  }
  double last_us = loops.back().end;
  double last_beside_us = begin_us;
  for (const Role& role : block.roles) {
    if (role.spans.empty()) continue;
    const Span& span = role.spans.back();
    double& last = is_of_rows(span.event) ? last_beside_us : last_us;
    last = std::max(last, span.end_us);
  }
  Intervals idle = without({{loops.front().begin, last_us}}, loops);
  const auto take = [&](Event event) {
    const double before = length(idle);
    idle = without(idle, of_event(block, event));
    return before - length(idle);
  };
  sums.start += loops.front().begin - begin_us;
  sums.main_loops += length(loops);
  sums.awaits_rows += take(Event::awaits_rows);
  sums.epilogue += take(Event::epilogue);
  // Results that leave after the last epilogue belong to it.
  const Intervals after_last = without(idle, {{0.0, loops.back().end}});
  sums.epilogue += length(after_last);
  sums.awaits_operands += length(idle) - length(after_last);
  sums.rows_beside += std::max(last_beside_us - last_us, 0.0);
  sums.tail += end_us - std::max(last_us, last_beside_us);
}

/// What a role does outside of its waits, and what its waits are for.
std::pair<const char*, const char*> states_of(const std::string& kernel, Event event) {
  switch (event) {
    case Event::main_loop:
      return {"main loop", "waits: operands"};
    case Event::epilogue:
      return {"epilogue", kernel == "p" ? "waits: g, u and buffers" : "waits: a slot"};
    case Event::awaits_turn:
      return {"waits: its turn", "waits: its turn"};
    case Event::awaits_parts:
      return {"waits: the other's epilogue", "waits: the other's epilogue"};
    case Event::skips:
      return {"gives stages back", "waits: operands"};
    case Event::awaits_rows:
      return {"waits: rows", "waits: rows"};
    case Event::loads:
      return {"issues loads", "waits: a free buffer"};
    case Event::stores:
      return {"stores", "waits: results"};
    case Event::pushes:
      return {"pushes", "waits: results"};
    case Event::pulls:
      return {"pulls", "pulls"};
    case Event::awaits_copies:
      return {"waits: last copies", "waits: last copies"};
    case Event::awaits_gradients:
      return {"waits: peers' dx", "waits: peers' dx"};
    case Event::reduces:
      return {"sums dx", "waits: slots"};
  }
  return {"unknown", "unknown"};
}

/// Sums over SMs of a role's states, in the order in which they first occur.
class StateSums {
 public:
  void add(const std::string& state, double us) {
    const auto found = std::find_if(sums_.begin(), sums_.end(),
                                    [&](const Share& share) { return share.first == state; });
    if (found == sums_.end()) {
      sums_.emplace_back(state, us);
    } else {
      found->second += us;
    }
  }
  [[nodiscard]] std::vector<Share> over(double total_us) const {
    std::vector<Share> shares = sums_;
    for (Share& share : shares) share.second /= total_us;
    return shares;
  }

 private:
  std::vector<Share> sums_;
};

void add_role(const std::string& kernel, const Role& role, double begin_us, double end_us,
              StateSums& sums) {
  if (role.spans.empty()) {
    sums.add("before and after", end_us - begin_us);
    return;
  }
  double spans_us = 0.0;
  for (const Span& span : role.spans) {
    const auto [busy, waiting] = states_of(kernel, span.event);
    const double span_us = span.end_us - span.begin_us;
    sums.add(busy, span_us - span.waited_us);
    sums.add(waiting, span.waited_us);
    spans_us += span_us;
  }
  const double first = role.spans.front().begin_us;
  const double last = role.spans.back().end_us;
  sums.add("before and after", (first - begin_us) + (end_us - last));
  sums.add("between tiles", last - first - spans_us);
}

void divide(KernelSummary& sums, double total_us) {
  for (double* share : {&sums.main_loops, &sums.at_full_rate, &sums.start, &sums.awaits_rows,
                        &sums.epilogue, &sums.awaits_operands, &sums.rows_beside, &sums.tail}) {
    *share /= total_us;
  }
}

std::string line_of(const char* format, double share) {
  char text[64];
  std::snprintf(text, sizeof text, format, 100.0 * share);
  return text;
}

}  // namespace

KernelSummary summarize(const KernelRun& kernel, int rank) {
  KernelSummary summary;
  summary.name = kernel.name;
  summary.rank = rank;
  summary.num_sms = static_cast<int>(kernel.blocks.size());
  if (kernel.blocks.empty()) return summary;
  const double begin_us = kernel.begin_us();
  const double end_us = kernel.end_us();
  const double total_us = (end_us - begin_us) * summary.num_sms;
  summary.ms = (end_us - begin_us) * 1e-3;

  std::vector<std::string> names(trace::kNumTracks);
  std::vector<StateSums> sums(trace::kNumTracks);
  for (const Block& block : kernel.blocks) {
    summary.clock_ghz += block.clock_ghz / summary.num_sms;
    add_block(block, begin_us, end_us, summary);
    for (std::size_t track = 0; track < block.roles.size(); ++track) {
      const Role& role = block.roles[track];
      summary.num_lost += role.num_lost;
      if (!role.name.empty()) names[track] = role.name;
      add_role(kernel.name, role, begin_us, end_us, sums[track]);
    }
  }
  divide(summary, total_us);
  for (std::size_t track = 0; track < names.size(); ++track) {
    if (names[track].empty()) continue;
    summary.roles.push_back({names[track], sums[track].over(total_us)});
  }
  return summary;
}

double share_under_weight_gradients(const std::vector<GpuTimeline>& gpus, int rank) {
  double pushed_us = 0.0;
  double hidden_us = 0.0;
  for (const GpuTimeline& gpu : gpus) {
    if (gpu.rank != rank) continue;
    Intervals gradients;  // two kernels where the first runs beside dx
    for (const KernelRun& kernel : gpu.kernels) {
      if (kernel.name != "weight_gradients") continue;
      gradients.push_back({kernel.begin_us(), kernel.end_us()});
    }
    const Intervals under = merged(std::move(gradients));
    for (const GpuTimeline& other : gpus) {
      const auto dx = std::find_if(other.kernels.begin(), other.kernels.end(),
                                   [](const KernelRun& kernel) { return kernel.name == "dx"; });
      if (other.rank == rank || dx == other.kernels.end()) continue;
      for (const Block& block : dx->blocks) {
        const Intervals pushes = of_event(block, Event::pushes);
        pushed_us += length(pushes);
        hidden_us += length(pushes) - length(without(pushes, under));
      }
    }
  }
  return pushed_us == 0.0 ? 0.0 : hidden_us / pushed_us;
}

std::string to_table(const std::vector<KernelSummary>& summaries) {
  std::string text;
  for (const KernelSummary& kernel : summaries) {
    char head[160];
    std::snprintf(head, sizeof head, "\n%s, GPU of rank %d: %.3f ms on %d SMs at %.2f GHz\n",
                  kernel.name.c_str(), kernel.rank, kernel.ms, kernel.num_sms, kernel.clock_ghz);
    text += head;
    text += line_of("  tensor cores  main loops %.1f%%", kernel.main_loops) +
            line_of(" (%.1f%% at full rate)", kernel.at_full_rate) +
            line_of("; idle: start %.1f%%", kernel.start) +
            line_of(", rows %.1f%%", kernel.awaits_rows) +
            line_of(", operands %.1f%%", kernel.awaits_operands) +
            line_of(", epilogue %.1f%%", kernel.epilogue) +
            line_of(", rows beside %.1f%%", kernel.rows_beside) +
            line_of(", tail %.1f%%\n", kernel.tail);
    for (const RoleShares& role : kernel.roles) {
      std::snprintf(head, sizeof head, "  %-12s", role.role.c_str());
      text += head;
      for (const auto& [state, share] : role.states) {
        if (share >= 0.0005) text += "  " + state + line_of(" %.1f%%", share);
      }
      text += "\n";
    }
    if (kernel.num_lost > 0) {
      text += "  " + std::to_string(kernel.num_lost) +
              " spans were lost (no room): the shares are wrong\n";
    }
  }
  return text;
}

nlohmann::ordered_json to_json(const std::vector<KernelSummary>& summaries) {
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const KernelSummary& kernel : summaries) {
    nlohmann::ordered_json roles = nlohmann::ordered_json::object();
    for (const RoleShares& role : kernel.roles) {
      for (const auto& [state, share] : role.states) roles[role.role][state] = share;
    }
    list.push_back({{"kernel", kernel.name},
                    {"rank", kernel.rank},
                    {"sms", kernel.num_sms},
                    {"ms", kernel.ms},
                    {"clock_ghz", kernel.clock_ghz},
                    {"main_loops", kernel.main_loops},
                    {"at_full_rate", kernel.at_full_rate},
                    {"start", kernel.start},
                    {"awaits_rows", kernel.awaits_rows},
                    {"awaits_operands", kernel.awaits_operands},
                    {"epilogue", kernel.epilogue},
                    {"rows_beside", kernel.rows_beside},
                    {"tail", kernel.tail},
                    {"lost_spans", kernel.num_lost},
                    {"roles", roles}});
  }
  return list;
}

}  // namespace megamoe::timeline
