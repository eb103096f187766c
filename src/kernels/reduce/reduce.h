// Sums over the slots of a token, where results were sent. Host interface; runs on `stream` after
// meet(results_sent). Nothing is written when the call failed, nothing runs when num_tokens is 0.
//
// Legend: T tokens of the call on this rank, K slots, H hidden.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/rank_view.h"

namespace megamoe::gpu {

struct RowsOutput {
  bf16* data = nullptr;  ///< 16-byte aligned rows of H elements
  std::int64_t stride = 0;
};
struct DweightsOutput {
  float* data = nullptr;  ///< [T, K]
  std::int64_t stride = 0;
};

/// y_t = sum over the token's slots, in slot order, of w * o: fp32 fma from 0, rounded once. Empty
/// slots are skipped.
void reduce_outputs(const RankView& view, std::byte* plan, const RowsOutput& y_TH,
                    std::int64_t num_tokens, cudaStream_t stream);

/// dx_t likewise with every weight 1; dweights as they were sent, exact zeros for empty slots.
void reduce_gradients(const RankView& view, std::byte* plan, const RowsOutput& dx_TH,
                      const DweightsOutput& dweights_TK, std::int64_t num_tokens,
                      cudaStream_t stream);
/// The same for the tokens that weight_gradients_beside_rows() (forward/forward.h) has left.
void reduce_other_gradients(const RankView& view, std::byte* plan, const RowsOutput& dx_TH,
                            const DweightsOutput& dweights_TK, std::int64_t num_tokens,
                            cudaStream_t stream);

}  // namespace megamoe::gpu
