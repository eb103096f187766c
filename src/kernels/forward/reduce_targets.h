// What is reduced beside the weight gradients.
#pragma once

#include <cstdint>

#include "kernels/reduce/reduce.h"

namespace megamoe::gpu {

struct ReduceTargets {
  const std::int32_t* ids_TK = nullptr;
  RowsOutput dx_TH;
  DweightsOutput dweights_TK;
  std::int32_t num_tokens = 0;
};

}  // namespace megamoe::gpu
