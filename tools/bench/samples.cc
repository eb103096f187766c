#include "bench/samples.h"

#include <algorithm>

namespace megamoe::bench {

Summary summarize(SamplesMs samples_ms) {
  std::sort(samples_ms.begin(), samples_ms.end());
  const std::size_t count = samples_ms.size();
  const double median = (samples_ms[(count - 1) / 2] + samples_ms[count / 2]) / 2.0;
  return {median, samples_ms.front(), samples_ms.back()};
}

}  // namespace megamoe::bench
