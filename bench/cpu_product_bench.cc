// The CPU product beside the fp32 FMA peak of one core, which is measured again before each
// repetition.
//
// Counters: gflops counts 2 m n k a product, packing and conversion included in the time;
// peak_share is gflops over (peak of one core x threads).
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

#include "cpu/fma_peak.h"
#include "cpu/product.h"
#include "cpu/thread_pool.h"
#include "megamoe/bf16.h"

namespace megamoe::cpu {
namespace {

enum class Layout : std::int64_t { k_contiguous, rows_contiguous };

Operand operand(const std::vector<bf16>& values, std::int64_t rows, std::int64_t k, Layout layout) {
  return layout == Layout::k_contiguous ? Operand{values.data(), k, 1}
                                        : Operand{values.data(), 1, rows};
}

std::vector<bf16> make_values(std::int64_t count) {
  std::vector<bf16> values(static_cast<std::size_t>(count));
  std::uint32_t state = 1;
  for (bf16& value : values) {
    state = state * 1664525U + 1013904223U;
    value = to_bf16(static_cast<float>(state >> 8) * 0x1p-23F - 1.0F);
  }
  return values;
}

void run_product(benchmark::State& state, int num_threads) {
  const std::int64_t m = state.range(0);
  const std::int64_t n = state.range(1);
  const std::int64_t num_k = state.range(2);
  const auto layout = static_cast<Layout>(state.range(3));
  const std::vector<bf16> a_values = make_values(m * num_k);
  const std::vector<bf16> b_values = make_values(n * num_k);
  std::vector<float> c(static_cast<std::size_t>(m * n));
  const Operand a = operand(a_values, m, num_k, layout);
  const Operand b = operand(b_values, n, num_k, layout);
  ThreadPool pool(num_threads);
  std::vector<ProductScratch> scratch(static_cast<std::size_t>(num_threads));
  // Columns are split: each task then packs its own part of b, and all of a.
  const std::int64_t num_tasks = num_threads == 1 ? 1 : 2 * num_threads;

  const double peak_gflops = measure_fma_peak_gflops() * num_threads;
  for ([[maybe_unused]] auto _ : state) {
    pool.parallel_for(num_tasks, [&](std::int64_t task, int thread_idx) {
      const std::int64_t first = n * task / num_tasks;
      const std::int64_t last = n * (task + 1) / num_tasks;
      product(m, last - first, num_k, a, b.from(first, 0), c.data() + first, n, ChainStart::zero,
              scratch[static_cast<std::size_t>(thread_idx)]);
    });
    benchmark::DoNotOptimize(c.data());
    benchmark::ClobberMemory();
  }
  const double gflop = 2e-9 * static_cast<double>(m) * static_cast<double>(n) *
                       static_cast<double>(num_k) * static_cast<double>(state.iterations());
  state.counters["gflops"] = benchmark::Counter(gflop, benchmark::Counter::kIsRate);
  state.counters["peak_gflops"] = peak_gflops;
  state.counters["peak_share"] =
      benchmark::Counter(gflop / peak_gflops, benchmark::Counter::kIsRate);
}

/// Timed by its processor time, which other programs disturb less than the clock's.
void one_core(benchmark::State& state) { run_product(state, 1); }

void all_cores(benchmark::State& state) {
  run_product(state, std::max(1, static_cast<int>(std::thread::hardware_concurrency())));
}

void set_up(benchmark::internal::Benchmark* registered) {
  registered->ArgNames({"m", "n", "k", "rows_contiguous"});
  registered->Unit(benchmark::kMillisecond)->MinTime(0.1)->Repetitions(5);
  registered->ReportAggregatesOnly(true);  // median and spread
}

BENCHMARK(one_core)
    ->Apply(set_up)
    ->ArgsProduct({{256}, {256}, {256}, {0, 1}})
    ->ArgsProduct({{512}, {512}, {512}, {0, 1}})
    ->ArgsProduct({{1024}, {1024}, {1024}, {0, 1}})
    ->ArgsProduct({{64}, {768}, {2048}, {0, 1}})   // few rows an expert, forward
    ->ArgsProduct({{768}, {2048}, {64}, {0, 1}});  // few rows an expert, weight gradient
BENCHMARK(all_cores)->Apply(set_up)->UseRealTime()->ArgsProduct({{1024}, {1024}, {1024}, {0, 1}});

}  // namespace
}  // namespace megamoe::cpu

int main(int argc, char** argv) {
  benchmark::AddCustomContext("instruction set", megamoe::cpu::simd_target_name());
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}
