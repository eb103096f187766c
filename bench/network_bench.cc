// What the network between stand-in hosts carries on this machine (TCP on the loopback interface),
// and what a step of the layer takes with its ranks on one, two or four of them.
//
// Counters: GBps_each_way is what a rank sends and, at the same time, receives. Latency is the time
// of one exchange of empty messages.
#include <benchmark/benchmark.h>

#include <chrono>
#include <cstdint>
#include <vector>

#include "comm/network/network.h"
#include "verify/run.h"

namespace megamoe {
namespace {

using Clock = std::chrono::steady_clock;
constexpr double kDeadlineS = 60.0;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// Two ranks on two hosts send each other range(0) rows of range(1) bytes, all at once.
void transfer(benchmark::State& state) {
  const std::int64_t num_rows = state.range(0);
  const std::int64_t row_bytes = state.range(1);
  constexpr int kTransfers = 20;
  for ([[maybe_unused]] auto _ : state) {
    double seconds = 0.0;
    run_ranks(even_topology(2, 1), [&](Communicator& group) {
      std::vector<std::byte> rows(num_rows * row_bytes);
      std::vector<std::byte> received(rows.size());
      std::vector<std::int32_t> order(num_rows);
      for (std::int64_t i = 0; i < num_rows; ++i) {
        order[i] = static_cast<std::int32_t>(num_rows - 1 - i);
      }
      const RowSegment sent{rows.data(), row_bytes, num_rows, order.data()};
      const RowSegment awaited{received.data(), row_bytes, num_rows, nullptr};
      const Message send{1 - group.rank(), {&sent, 1}};
      const Message receive{1 - group.rank(), {&awaited, 1}};
      Clock::time_point start;
      for (int i = -2; i < kTransfers; ++i) {  // two to warm up
        if (i == 0) start = Clock::now();
        group.network()->transfer({&send, 1}, {&receive, 1}, "rows", kDeadlineS);
      }
      if (group.rank() == 0) seconds = seconds_since(start) / kTransfers;
    });
    state.SetIterationTime(seconds);
  }
  state.counters["GBps_each_way"] =
      benchmark::Counter(1e-9 * static_cast<double>(num_rows * row_bytes),
                         benchmark::Counter::kIsIterationInvariantRate);
}

/// Forward and backward on four ranks, qwen3-30b with a quarter of its sizes, on range(0) hosts.
void step(benchmark::State& state) {
  verify::ProblemSpec spec;
  spec.tokens_per_rank.assign(4, 256);
  spec.hidden_dim = 512;
  spec.intermediate_dim = 192;
  spec.num_experts = 32;
  spec.top_k = 8;
  const verify::Problem problem = make_problem(spec);
  verify::RunOptions options;
  options.num_hosts = static_cast<int>(state.range(0));
  constexpr int kSteps = 5;
  for ([[maybe_unused]] auto _ : state) {
    double seconds = 0.0;
    run_ranks(topology_of(spec, options), [&](Communicator& group) {
      verify::RankSession session(problem, options, group);
      Clock::time_point start;
      for (int i = -1; i < kSteps; ++i) {
        if (i == 0) {
          group.barrier("the first timed step", kDeadlineS);
          start = Clock::now();
        }
        session.backward(session.forward());
      }
      group.barrier("the last timed step", kDeadlineS);
      if (group.rank() == 0) seconds = seconds_since(start) / kSteps;
    });
    state.SetIterationTime(seconds);
  }
}

void set_up(benchmark::internal::Benchmark* registered) {
  registered->UseManualTime()->Unit(benchmark::kMillisecond)->Iterations(3)->Repetitions(7);
  registered->ReportAggregatesOnly(true);  // median and spread
}

BENCHMARK(transfer)
    ->Apply(set_up)
    ->ArgNames({"rows", "bytes"})
    ->Args({0, 4096})
    ->Args({16, 4096})
    ->Args({256, 4096})
    ->Args({4096, 4096})
    ->Args({2048, 14336});
BENCHMARK(step)->Apply(set_up)->ArgName("hosts")->Arg(1)->Arg(2)->Arg(4);

}  // namespace
}  // namespace megamoe

BENCHMARK_MAIN();
