#include "layer_report.h"

#include <cstdint>
#include <cstdio>

#include "common/json_file.h"

namespace megamoe::bench {
namespace {

/// `bytes`: that the pass sends.
Json to_json(const Spans& spans, const Alone& alone, std::int64_t bytes) {
  return {{"ms", spans.total_ms},
          {"off_ms", alone.off.total_ms},
          {"clock_ghz", spans.clock_ghz},
          {"off_clock_ghz", alone.off.clock_ghz},
          {"bytes", bytes},
          {"compute_ms", alone.off.compute_ms},
          {"transfer_ms", alone.transfer_ms},
          {"first_group_ms", spans.first_ms},
          {"last_group_ms", spans.last_ms},
          {"bound_ms", bound_ms(spans, alone)},
          {"of_bound", spans.total_ms / bound_ms(spans, alone)},
          {"of_longer", spans.total_ms / longer_ms(alone)},
          {"of_off", spans.total_ms / alone.off.total_ms}};
}

void print(const char* pass, const Spans& spans, const Alone& alone) {
  std::printf(
      "    %-8s %7.2f ms at %.2f GHz, %.2f of %.2f without overlap at %.2f; alone: compute %.2f, "
      "transfer %.2f, %.2f of the longer; first %.2f, last %.2f, %.2f of the bound\n",
      pass, spans.total_ms, spans.clock_ghz, spans.total_ms / alone.off.total_ms,
      alone.off.total_ms, alone.off.clock_ghz, alone.off.compute_ms, alone.transfer_ms,
      spans.total_ms / longer_ms(alone), spans.first_ms, spans.last_ms,
      spans.total_ms / bound_ms(spans, alone));
}

void write_trace(const std::string& path, const Pass& pass) {
  Json events = Json::array();
  const auto add = [&](const Stages& stages, int thread, const char* name) {
    events.push_back({{"ph", "M"},
                      {"pid", 0},
                      {"tid", thread},
                      {"name", "thread_name"},
                      {"args", {{"name", name}}}});
    for (const cuda::StageClock::Stage& stage : stages) {
      events.push_back({{"ph", "X"},
                        {"pid", 0},
                        {"tid", thread},
                        {"name", stage.name},
                        {"ts", stage.start_ms * 1e3},
                        {"dur", stage.ms * 1e3}});
    }
  };
  add(pass.compute, 0, "caller's stream");
  add(pass.network, 1, "network");
  tools::JsonFile(path).write(Json{{"traceEvents", events}});
}

}  // namespace

void print(const Way& way, const LayerTimes& times, const AllAlone& alone) {
  std::printf("  %d group%s%s, %d CTAs\n", times.num_groups, times.num_groups == 1 ? "" : "s",
              way.asked_groups == 0 ? " by default" : "", way.ctas);
  print("forward", times.forward, alone.forward);
  print("backward", times.backward, alone.backward);
  print("step", times.step(), alone.step());
  std::fflush(stdout);
}

Json record_of(const Options& options, const Topology& topology, const Way& way,
               const LayerTimes& times, const AllAlone& alone) {
  const Traffic& traffic = times.traffic;
  return {{"layer", "megamoe"},
          {"benchmark", "layer over hosts"},
          {"times_of", "slowest rank"},
          {"backend", "cuda"},
          {"mode", "recompute"},
          {"overlap", way.overlap == Overlap::off ? "off" : "on"},
          {"groups", times.num_groups},
          {"groups_by_default", way.asked_groups == 0},
          {"pause_ms", options.pause_ms},
          {"network_ctas", way.ctas},
          {"hidden_dim", options.shape.hidden_dim},
          {"intermediate_dim", options.shape.intermediate_dim},
          {"num_experts", options.shape.num_experts},
          {"top_k", options.shape.top_k},
          {"tokens_per_rank", options.shape.max_tokens},
          {"ranks", topology.num_ranks()},
          {"hosts", topology.num_hosts()},
          {"routing", "uniform"},
          {"forward", to_json(times.forward, alone.forward, traffic.forward_bytes)},
          {"backward", to_json(times.backward, alone.backward, traffic.backward_bytes)},
          {"step",
           to_json(times.step(), alone.step(), traffic.forward_bytes + traffic.backward_bytes)}};
}

void write_traces(const std::string& path, const Way& way, const LayerTimes& times) {
  const std::string name =
      path + "." + std::to_string(times.num_groups) + (way.asked_groups == 0 ? "d" : "");
  write_trace(name + ".forward.json", times.last_forward);
  write_trace(name + ".backward.json", times.last_backward);
}

}  // namespace megamoe::bench
