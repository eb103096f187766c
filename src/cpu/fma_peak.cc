#include "cpu/fma_peak.h"

#include <algorithm>
#include <chrono>
#include <cstdint>

#include "cpu/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/fma_peak.cc"
#include "hwy/foreach_target.h"
// Highway's order: foreach_target.h before anything that includes highway.h.
#include "cpu/fma-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace megamoe::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Independent chains: more than latency times issue width (4 x 2) and few enough for 16 registers.
constexpr int kNumChains = 12;

const char* target_name() { return hwy::TargetName(HWY_TARGET); }

/// Runs num_steps steps of every chain; returns the number of floating-point operations.
/// The operands come from the caller and the sum goes back to it: neither can be folded away.
double run_fma_chains(std::int64_t num_steps, float factor, float* sum) {
  const hn::ScalableTag<float> d;
  using V = hn::Vec<decltype(d)>;
  const V a = hn::Set(d, factor);
  V chains[kNumChains];
#pragma GCC unroll 12
  for (int chain = 0; chain < kNumChains; ++chain) {
    chains[chain] = hn::Set(d, factor * static_cast<float>(chain));
  }
  for (std::int64_t step = 0; step < num_steps; ++step) {
#pragma GCC unroll 12
    for (int chain = 0; chain < kNumChains; ++chain) {
      chains[chain] = fused_multiply_add(a, a, chains[chain]);
    }
  }
  V total = hn::Zero(d);
#pragma GCC unroll 12
  for (int chain = 0; chain < kNumChains; ++chain) total = hn::Add(total, chains[chain]);
  *sum += hn::GetLane(total);
  return 2.0 * kNumChains * static_cast<double>(hn::Lanes(d)) * static_cast<double>(num_steps);
}

}  // namespace megamoe::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace megamoe::cpu {

HWY_EXPORT(run_fma_chains);
HWY_EXPORT(target_name);

const char* simd_target_name() { return HWY_DYNAMIC_DISPATCH(target_name)(); }

double measure_fma_peak_gflops() {
  using Clock = std::chrono::steady_clock;
  constexpr std::int64_t kStepsPerRun = 20'000;
  constexpr std::chrono::milliseconds kTotalTime{50};
  const volatile float factor = 0x1p-10F;
  volatile float sink = 0.0F;
  double best_gflops = 0.0;
  const Clock::time_point start = Clock::now();
  Clock::time_point run_end = start;
  while (run_end - start < kTotalTime) {
    float sum = 0.0F;
    const Clock::time_point run_start = Clock::now();
    const double num_flops = HWY_DYNAMIC_DISPATCH(run_fma_chains)(kStepsPerRun, factor, &sum);
    run_end = Clock::now();
    sink = sum;
    const std::chrono::duration<double, std::nano> run_ns = run_end - run_start;
    best_gflops = std::max(best_gflops, num_flops / run_ns.count());
  }
  static_cast<void>(sink);
  return best_gflops;
}

}  // namespace megamoe::cpu
#endif  // HWY_ONCE
