#include "layer_times.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>

#include "bench/cuda_rank_tensors.h"
#include "bench/samples.h"
#include "bench/sm_clock.h"
#include "cuda/runtime.h"
#include "cuda/workspace.h"
#include "layer/workspace.h"
#include "megamoe/megamoe.h"

namespace megamoe::bench {
namespace {

using cuda::StageClock;

bool waits(const std::string& stage) {
  return stage.starts_with("await") || stage.starts_with("meet");
}

Spans spans_of(const Stages& compute, const Stages& network) {
  Spans spans;
  for (const StageClock::Stage& stage : compute) {
    spans.total_ms = std::max(spans.total_ms, stage.start_ms + stage.ms);
    if (!waits(stage.name) && stage.name != "stage_and_plan") spans.compute_ms += stage.ms;
  }
  for (const StageClock::Stage& stage : network) {
    if (stage.name == "results") spans.last_ms = stage.ms;
  }
  bool has_rows = false;
  for (const StageClock::Stage& stage : network) {
    if (stage.name == "results" || has_rows) break;
    spans.first_ms += waits(stage.name) ? 0.0 : stage.ms;
    has_rows = stage.name == "rows";
  }
  return spans;
}

Spans median(const std::vector<Spans>& all) {
  const auto of = [&](double Spans::*member) {
    SamplesMs samples;
    for (const Spans& spans : all) samples.push_back(spans.*member);
    return summarize(samples).median_ms;
  };
  return {of(&Spans::total_ms), of(&Spans::compute_ms), of(&Spans::first_ms), of(&Spans::last_ms),
          of(&Spans::clock_ghz)};
}

/// Of the rank whose pass took longest; all of it that rank's, so that parts belong together.
Spans slowest_rank(const Spans& mine, Communicator& group) {
  std::vector<Spans> all(group.size());
  group.all_gather(&mine, all.data(), sizeof mine, "times", kDeadlineS);
  return *std::ranges::max_element(all, {}, &Spans::total_ms);
}

}  // namespace

LayerTimes time_layer(const Options& options, Communicator& group, int device, Overlap overlap) {
  LayerTimes times;
  LayerConfig config;
  config.shape = options.shape;
  config.backend = Backend::cuda;
  config.overlap = overlap;
  config.memory_mode = MemoryMode::recompute;
  const auto ids_RTK = routing_ids(Routing::uniform, config.shape, config.shape.max_tokens,
                                   group.size(), /*seed=*/1);
  config.row_capacity = std::max(resolved_row_capacity(config, group.size()),
                                 count_busiest(config.shape, ids_RTK).of_rank);
  times.traffic = busiest_between_hosts(config.shape, group.topology(), ids_RTK);
  RankTensors tensors(config, group.size(), group.rank(), device, ids_RTK[group.rank()]);
  Workspace workspace(config, group);
  MoeLayer layer(config, group, workspace);
  auto& memory = static_cast<cuda::CudaWorkspace&>(*workspace.impl().memory);
  const cuda::OwnedStream stream;
  memory.stages.switch_on();
  memory.network_stages.switch_on();
  const auto take = [&] {
    layer.check({stream.get()});
    const Stages network = memory.network_stages.take_beside(memory.stages);
    return Pass{memory.stages.take(), network};
  };
  std::vector<Spans> forward;
  std::vector<Spans> backward;
  SmClock clock(device);
  const auto spans_at_clock = [&](const Pass& pass) {
    Spans spans = spans_of(pass.compute, pass.network);
    spans.clock_ghz = clock.ghz(stream.get());
    return spans;
  };
  constexpr int kWarmUps = 2;
  // A chip lowers its clock within tens of milliseconds of full load. Without overlap it rests
  // while rows travel; with overlap it does not. So that both begin alike, it rests before each
  // pass.
  const auto rest = [&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(options.pause_ms));
    group.barrier("a timed pass", kDeadlineS);
  };
  for (int i = -kWarmUps; i < options.num_repeats; ++i) {
    rest();
    clock.start(stream.get());
    const CallContext call =
        layer.forward(tensors.forward_input(), tensors.forward_output(), {stream.get()});
    clock.end(stream.get());
    times.last_forward = take();
    if (i >= 0) forward.push_back(spans_at_clock(times.last_forward));
    rest();
    clock.start(stream.get());
    layer.backward(call, tensors.backward_input(), tensors.backward_output(), {stream.get()});
    clock.end(stream.get());
    times.last_backward = take();
    if (i >= 0) backward.push_back(spans_at_clock(times.last_backward));
  }
  times.num_groups = static_cast<int>(
      std::ranges::count(times.last_forward.compute, "down", &StageClock::Stage::name));
  times.forward = slowest_rank(median(forward), group);
  times.backward = slowest_rank(median(backward), group);
  return times;
}

Spans operator+(const Spans& first, const Spans& second) {
  const double total_ms = first.total_ms + second.total_ms;
  return {total_ms, first.compute_ms + second.compute_ms, first.first_ms + second.first_ms,
          first.last_ms + second.last_ms,
          (first.clock_ghz * first.total_ms + second.clock_ghz * second.total_ms) / total_ms};
}

AllAlone alone_of(const LayerTimes& off, double bytes_per_s) {
  const auto of = [&](const Spans& pass, std::int64_t bytes) {
    return Alone{pass, 1e3 * static_cast<double>(bytes) / bytes_per_s};
  };
  return {of(off.forward, off.traffic.forward_bytes), of(off.backward, off.traffic.backward_bytes)};
}

double longer_ms(const Alone& alone) { return std::max(alone.off.compute_ms, alone.transfer_ms); }

double bound_ms(const Spans& spans, const Alone& alone) {
  return longer_ms(alone) + spans.first_ms + spans.last_ms;
}

}  // namespace megamoe::bench
