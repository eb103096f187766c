// A build without CUDA.
#include "bench/step_bench.h"
#include "megamoe/error.h"

namespace megamoe::bench {

StepTimes time_step_on_cuda(const StepProblem& /*problem*/, int /*num_repeats*/) {
  throw Error(ErrorCode::unsupported,
              "backend cuda: this build has none (MEGAMOE_CUDA is off); use the cpu backend");
}

}  // namespace megamoe::bench
