// The CPU backend's matrix product on one core.
#pragma once

#include <cstdint>

namespace megamoe::bench {

/// GFLOP/s of a dense dim x dim x dim product on one thread, the best of a few runs: it is set
/// beside measure_fma_peak_gflops(), which is a best too.
double product_gflops(std::int64_t dim);

}  // namespace megamoe::bench
