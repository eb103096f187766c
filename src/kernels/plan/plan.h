// The plan of a call on the device: counts, their exchange, offsets, pull lists. Host interface;
// everything runs on `stream`, without synchronisation, and can be captured in a graph.
//
// The order of launches, forward:   count_slots, enter_call, write_pull_lists
//                         backward: count_slots of the plan's ids, enter_call, write_pull_lists
// What comes out equals routing/plan.h, bit for bit, whatever the blocks' timing.
//
// Legend: T tokens of the call on this rank, K slots, E experts, R ranks.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "device/call_control.h"
#include "kernels/rank_view.h"
#include "megamoe/error.h"

namespace megamoe::gpu {

/// Ids and weights as the caller has them: element [t, k] at data[t * stride + k].
struct RoutingInput {
  const std::int32_t* ids = nullptr;
  std::int64_t id_stride = 0;
  const float* weights = nullptr;
  std::int64_t weight_stride = 0;
};

/// Copies ids and weights into `plan` and counts the slots of every expert, block by block. Bad ids
/// are noted for enter_call(). Nothing runs when num_tokens is 0.
void count_slots(const RankView& view, std::byte* plan, const RoutingInput& input,
                 std::int64_t num_tokens, cudaStream_t stream);
/// The same from the ids that a forward call left in `plan`.
void count_planned_slots(const RankView& view, std::byte* plan, std::int64_t num_tokens,
                         cudaStream_t stream);

/// The first `kept_rows` rows of the row buffers, a multiple of 64, have g and u kept: divides
/// every group into its rows among them and the others.
void split_groups(const RankView& view, std::byte* plan, std::int64_t kept_rows,
                  cudaStream_t stream);

/// Entering a call in two launches, for ranks that share a GPU: `rest`, which waits, is enqueued
/// once all of them have enqueued `announcement`.
enum class EnterPart { whole, announcement, rest };

/// Advances the epoch; tells every peer that this rank enters the call and, forward, its counts;
/// waits for all of them (entry deadline); lays out the rows of all experts and this rank's pull
/// lists. Any rank's bad id, too small capacity or failed forward call fails the call on every rank
/// in the same way. One CTA.
void enter_call(const RankView& view, std::byte* plan, CallKind kind, std::uint64_t kind_and_layer,
                std::int64_t num_tokens, cudaStream_t stream, EnterPart part = EnterPart::whole);

/// Enters the call that peers make, or will make, next and fails it on every rank: this rank's host
/// has found its arguments wrong or has an older failure to report. `code` is what peers throw;
/// this rank records nothing. `plan` is overwritten.
void refuse_call(const RankView& view, std::byte* plan, CallKind kind, ErrorCode code,
                 cudaStream_t stream, EnterPart part = EnterPart::whole);

/// This rank has entered a call, or was about to, that its host cannot enqueue to its end: it fails
/// for good, and peers that wait for it in this call learn of it at once. Records nothing.
void give_up(const RankView& view, cudaStream_t stream);

/// Writes the tokens and slots of this rank's pull lists. Nothing runs when num_tokens is 0.
void write_pull_lists(const RankView& view, std::byte* plan, std::int64_t num_tokens,
                      cudaStream_t stream);

/// Puts the control block of a fresh or poisoned scratch in order. Not for use within a graph.
void reset_control(const RankView& view, cudaStream_t stream);

}  // namespace megamoe::gpu
