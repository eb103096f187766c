#include "trace/chrome_json.h"

#include <cmath>
#include <cstdio>
#include <set>
#include <string>

namespace megamoe::timeline {
namespace {

using json = nlohmann::ordered_json;

/// To nanoseconds: more digits only make the file longer.
double rounded(double us) { return std::round(us * 1e3) * 1e-3; }

// Threads are sorted by number: stages first, then SM by SM its kernels and its roles.
constexpr int kStagesThread = 0;
constexpr int kThreadsAnSm = trace::kNumTracks + 1;
int kernels_thread(std::uint32_t sm) { return 1 + static_cast<int>(sm) * kThreadsAnSm; }

json metadata(const char* what, int process, int thread, const json& args) {
  return {{"ph", "M"}, {"name", what}, {"pid", process}, {"tid", thread}, {"args", args}};
}

json complete_event(const std::string& name, const std::string& category, int process, int thread,
                    double begin_us, double end_us) {
  return {{"ph", "X"},
          {"name", name},
          {"cat", category},
          {"pid", process},
          {"tid", thread},
          {"ts", rounded(begin_us)},
          {"dur", rounded(end_us - begin_us)}};
}

std::set<std::uint32_t> choose_sms(const GpuTimeline& gpu, int num_sms) {
  std::set<std::uint32_t> all;
  for (const KernelRun& kernel : gpu.kernels) {
    for (const Block& block : kernel.blocks) all.insert(block.sm);
  }
  if (num_sms == 0 || num_sms >= static_cast<int>(all.size())) return all;
  const std::vector<std::uint32_t> sorted(all.begin(), all.end());
  std::set<std::uint32_t> chosen;
  for (int i = 0; i < num_sms; ++i) {
    chosen.insert(sorted[static_cast<std::size_t>(i) * sorted.size() / num_sms]);
  }
  return chosen;
}

/// The wait for a tile's first stage is a span of its own: until then nothing is multiplied.
void add_span(json& events, const Span& span, const std::string& kernel, int process, int thread) {
  const bool multiplies = span.event == Event::main_loop;
  const double begin_us = span.begin_us + (multiplies ? span.first_waited_us : 0.0);
  if (multiplies && span.first_waited_us > 0.0) {
    events.push_back(
        complete_event("awaits operands", kernel, process, thread, span.begin_us, begin_us));
  }
  json event = complete_event(std::string(to_string(span.event)), kernel, process, thread, begin_us,
                              span.end_us);
  const double waited_us = span.waited_us - (multiplies ? span.first_waited_us : 0.0);
  event["args"] = {
      {"expert", span.group}, {"rows", span.num_units * 16}, {"waited_us", rounded(waited_us)}};
  events.push_back(std::move(event));
}

void add_block(json& events, const KernelRun& kernel, const Block& block, int process,
               std::set<int>& named) {
  char sm[16];
  std::snprintf(sm, sizeof sm, "SM %03u ", block.sm);
  const int first_thread = kernels_thread(block.sm);
  const auto name_thread = [&](int thread, const std::string& name) {
    if (!named.insert(thread).second) return;
    events.push_back(metadata("thread_name", process, thread, {{"name", sm + name}}));
  };
  name_thread(first_thread, "kernel");
  events.push_back(
      complete_event(kernel.name, "kernel", process, first_thread, block.begin_us, block.end_us));
  for (std::size_t track = 0; track < block.roles.size(); ++track) {
    const Role& role = block.roles[track];
    if (role.spans.empty()) continue;
    const int thread = first_thread + 1 + static_cast<int>(track);
    // A warp's role differs between kernels: the thread is named by what it is.
    name_thread(thread, track >= static_cast<std::size_t>(trace::track_math_0)
                            ? role.name
                            : "warp " + std::to_string(track));
    for (const Span& span : role.spans) add_span(events, span, kernel.name, process, thread);
  }
}

}  // namespace

json to_chrome_json(const std::vector<GpuTimeline>& gpus, int num_sms) {
  json events = json::array();
  for (const GpuTimeline& gpu : gpus) {
    events.push_back(metadata("process_name", gpu.rank, kStagesThread,
                              {{"name", "GPU of rank " + std::to_string(gpu.rank)}}));
    events.push_back(metadata("thread_name", gpu.rank, kStagesThread, {{"name", "stages"}}));
    for (const Stage& stage : gpu.stages) {
      events.push_back(complete_event(stage.name, "stage", gpu.rank, kStagesThread, stage.begin_us,
                                      stage.end_us));
    }
    const std::set<std::uint32_t> sms = choose_sms(gpu, num_sms);
    std::set<int> named;
    for (const KernelRun& kernel : gpu.kernels) {
      for (const Block& block : kernel.blocks) {
        if (sms.contains(block.sm)) add_block(events, kernel, block, gpu.rank, named);
      }
    }
  }
  return {{"displayTimeUnit", "ns"}, {"traceEvents", std::move(events)}};
}

}  // namespace megamoe::timeline
