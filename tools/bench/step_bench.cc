#include "bench/step_bench.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "bench/layer_stack.h"
#include "megamoe/communicator.h"

namespace megamoe::bench {
namespace {

using Clock = std::chrono::steady_clock;

double ms_between(Clock::time_point start, Clock::time_point end) {
  return std::chrono::duration<double, std::milli>(end - start).count();
}

class HostMemory final : public StackMemory {
 public:
  std::shared_ptr<std::byte> allocate(std::int64_t bytes) override {
    return {new std::byte[static_cast<std::size_t>(bytes)](), std::default_delete<std::byte[]>()};
  }
  void upload(std::byte* to, const void* host, std::int64_t bytes) override {
    std::memcpy(to, host, static_cast<std::size_t>(bytes));
  }
  void copy(std::byte* to, const std::byte* from, std::int64_t bytes) override {
    std::memcpy(to, from, static_cast<std::size_t>(bytes));
  }
};

PassTimes time_passes(LayerStack& stack, std::int64_t num_layers, Communicator& ranks,
                      const LayerConfig& config, int num_repeats) {
  PassTimes times;
  for (int repeat = -1; repeat < num_repeats; ++repeat) {
    ranks.barrier("a timed step", config.entry_deadline_s);
    const Clock::time_point start = Clock::now();
    stack.forward(num_layers, {});
    ranks.barrier("the end of a timed forward", config.inner_deadline_s);
    const Clock::time_point middle = Clock::now();
    stack.backward(num_layers, {});
    ranks.barrier("the end of a timed backward", config.inner_deadline_s);
    const Clock::time_point end = Clock::now();
    if (repeat < 0) continue;
    times.forward_ms.push_back(ms_between(start, middle));
    times.backward_ms.push_back(ms_between(middle, end));
  }
  return times;
}

}  // namespace

SamplesMs PassTimes::total_ms() const {
  SamplesMs total = forward_ms;
  for (std::size_t i = 0; i < total.size(); ++i) total[i] += backward_ms[i];
  return total;
}

void keep_slowest(PassTimes& times, const PassTimes& other) {
  const auto keep = [](SamplesMs& samples, const SamplesMs& others) {
    if (samples.empty()) samples.assign(others.size(), 0.0);
    for (std::size_t i = 0; i < samples.size(); ++i) samples[i] = std::max(samples[i], others[i]);
  };
  keep(times.forward_ms, other.forward_ms);
  keep(times.backward_ms, other.backward_ms);
}

StepTimes time_step_on_cpu(const StepProblem& problem, int num_repeats) {
  const LayerConfig& config = problem.config;
  require_memory(step_state(config, problem.num_ranks(), problem.num_layers), problem.num_ranks(),
                 sysconf(_SC_AVPHYS_PAGES) * sysconf(_SC_PAGESIZE), "the machine");
  StepTimes times;
  run_ranks(problem.num_ranks(), [&](Communicator& ranks) {
    HostMemory memory;
    LayerStack stack(config, problem.num_layers, ranks, memory, problem.ids_RTK[ranks.rank()]);
    const PassTimes one_layer = time_passes(stack, 1, ranks, config, num_repeats);
    const PassTimes step = time_passes(stack, problem.num_layers, ranks, config, num_repeats);
    if (ranks.rank() == 0) times = {step, one_layer};  // all have waited for the last
  });
  return times;
}

}  // namespace megamoe::bench
