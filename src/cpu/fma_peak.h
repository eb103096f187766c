// The ceiling that the CPU product is measured against.
#pragma once

namespace megamoe::cpu {

/// Highest rate of fp32 multiply-adds that one core reaches on registers alone, with the
/// instruction set that product() uses on this machine, in GFLOP/s (an fma is two). Takes about
/// 50 ms; the best of many short runs, since other programs can only slow it down.
double measure_fma_peak_gflops();

/// The instruction set that product() uses on this machine: "AVX3" is AVX-512.
const char* simd_target_name();

}  // namespace megamoe::cpu
