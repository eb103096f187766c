#include "bench/product_bench.h"

#include <algorithm>
#include <chrono>
#include <vector>

#include "cpu/product.h"

namespace megamoe::bench {

double product_gflops(std::int64_t dim) {
  constexpr int kNumRuns = 10;
  const std::vector<bf16> a(dim * dim, to_bf16(0.5F));
  const std::vector<bf16> b(dim * dim, to_bf16(0.25F));
  std::vector<float> c(dim * dim);
  cpu::ProductScratch scratch;
  double best_s = 1e30;
  for (int run = 0; run < kNumRuns; ++run) {
    const auto start = std::chrono::steady_clock::now();
    cpu::product(dim, dim, dim, {a.data(), dim, 1}, {b.data(), dim, 1}, c.data(), dim,
                 cpu::ChainStart::zero, scratch);
    const std::chrono::duration<double> taken_s = std::chrono::steady_clock::now() - start;
    best_s = std::min(best_s, taken_s.count());
  }
  const auto size = static_cast<double>(dim);
  return 2.0 * size * size * size / best_s * 1e-9;
}

}  // namespace megamoe::bench
