// How rows travel without overlap: a source stages them, destinations pull each token once and
// store it to every row that it fills, results are pushed to the slots where they are awaited. Host
// interface; everything runs on `stream`, without synchronisation.
//
// The order of launches around the plan's (plan/plan.h):
//   stage_rows, [plan], meet(rows_staged), pull_rows, [products], push_rows, meet(results_sent),
//   [reduction]
// Only enter_call() and meet() wait, in one CTA each.
//
// Legend: T tokens of the call on this rank, K slots, H hidden, I intermediate, C padded rows.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "device/call_control.h"
#include "kernels/rank_view.h"

namespace megamoe::gpu {

/// Rows of H elements, `stride` elements apart; 16-byte aligned.
struct RowsInput {
  const bf16* data = nullptr;
  std::int64_t stride = 0;
};

/// Copies x into symmetric memory, and in a backward call dy and the plan's weights. What peers
/// read of the call before is over: they have sent its results. Nothing runs when num_tokens is 0.
void stage_forward(const RankView& view, const RowsInput& x_TH, std::int64_t num_tokens,
                   cudaStream_t stream);
void stage_backward(const RankView& view, std::byte* plan, const RowsInput& x_TH,
                    const RowsInput& dy_TH, std::int64_t num_tokens, cudaStream_t stream);

/// Tells every peer that what went before on the stream is done. One CTA.
void announce(const RankView& view, device::Signal what, cudaStream_t stream);

/// As announce(), and waits for the same of all of
/// them (inner deadline). Where the call has failed or fails here, the plan's groups become empty,
/// so that products have nothing to do. One CTA.
void meet(const RankView& view, std::byte* plan, device::Signal what, cudaStream_t stream);

/// The rows of this rank's experts. Pad rows become zero, with weight 0 and an origin of rank -1.
struct PulledRows {
  bf16* x_CH = nullptr;
  bf16* dy_CH = nullptr;      ///< backward only, null otherwise
  float* weight_C = nullptr;  ///< backward only, null otherwise
  RowOrigin* origin_C = nullptr;
};

void pull_rows(const RankView& view, std::byte* plan, const PulledRows& rows, cudaStream_t stream);
/// The same through the copy engine and shared memory; equal results.
void pull_rows_in_bulk(const RankView& view, std::byte* plan, const PulledRows& rows,
                       cudaStream_t stream);

/// For a product that pulls its rows itself (forward/forward.h), in place of pull_rows: writes
/// origins, weights and pad rows, the order in which tokens are pulled, and how many rows each
/// block of 64 awaits. Follows meet(rows_staged).
void order_pulls(const RankView& view, std::byte* plan, const PulledRows& rows,
                 cudaStream_t stream);

/// Sums of p * a over 64 channels each, [I / 64, C]; absent in a forward call.
struct DweightSegments {
  const float* data = nullptr;
  std::int64_t row_stride = 0;  ///< C: the distance of a row's segments
  std::int32_t num_segments = 0;
};

/// Stores every row, and the ordered sum of its dweight segments, to its slot at the source.
void push_rows(const RankView& view, std::byte* plan, const bf16* rows_CH,
               const RowOrigin* origin_C, const DweightSegments& dweights, cudaStream_t stream);

/// The second part of it alone, for rows that a product has pushed itself.
void push_dweights(const RankView& view, std::byte* plan, const RowOrigin* origin_C,
                   const DweightSegments& dweights, cudaStream_t stream);

/// Loads the exchange's kernels and those of plan and reduction; call once before the first call of
/// a process (kernels/launch.h says why).
void load_exchange_kernels();

}  // namespace megamoe::gpu
