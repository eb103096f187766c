#include "cpu/exchange.h"

#include <algorithm>

namespace megamoe::cpu {
namespace {

/// Tokens that one task fetches.
constexpr std::int64_t kTokensPerTask = 32;

/// Calls visit(source, pull token) for everything that this rank fetches. Starts with its own
/// tokens, then the next rank's, so that not all ranks read from the same one.
template <class Visit>
void for_each_pull(const StageContext& stage, Visit visit) {
  const Buffers& buffers = stage.buffers;
  const int num_ranks = stage.dims.routing.num_ranks;
  for (int step = 0; step < num_ranks; ++step) {
    const int source = (buffers.rank + step) % num_ranks;
    const PullLists& lists = buffers.symmetric_R[source].pull_lists;
    const std::int64_t begin = lists.destination_begin[buffers.rank];
    const std::int64_t count = lists.destination_begin[buffers.rank + 1] - begin;
    const std::int64_t num_tasks = (count + kTokensPerTask - 1) / kTokensPerTask;
    stage.threads.parallel_for(num_tasks, [&](std::int64_t task, int /*thread_idx*/) {
      const std::int64_t end = std::min(count, (task + 1) * kTokensPerTask);
      for (std::int64_t i = task * kTokensPerTask; i < end; ++i) {
        visit(source, lists.tokens[begin + i], lists.slots);
      }
    });
  }
}

/// Reads the token's row once and stores it to each of its rows here.
void copy_row(const StageContext& stage, const bf16* staged_TH, const PullToken& pull,
              const PullSlot* slots, bf16* rows_CH) {
  const std::int64_t hidden = stage.dims.hidden_dim;
  const bf16* row = staged_TH + pull.token * hidden;
  for (std::int32_t i = 0; i < pull.num_slots; ++i) {
    std::copy(row, row + hidden, rows_CH + slots[pull.first_slot + i].row * hidden);
  }
}

void note_origins(const StageContext& stage, int source, const PullToken& pull,
                  const PullSlot* slots) {
  for (std::int32_t i = 0; i < pull.num_slots; ++i) {
    const PullSlot& slot = slots[pull.first_slot + i];
    stage.buffers.origin_C[slot.row] = {source, pull.token, slot.slot};
  }
}

}  // namespace

void stage_rows(const StageContext& stage, const ConstTensorView& rows_TH, bf16* out_TH) {
  const std::int64_t hidden = stage.dims.hidden_dim;
  stage.threads.parallel_for(rows_TH.sizes[0], [&](std::int64_t token, int /*thread_idx*/) {
    const bf16* row = static_cast<const bf16*>(rows_TH.data) + token * rows_TH.strides[0];
    std::copy(row, row + hidden, out_TH + token * hidden);
  });
}

void stage_pull_lists(const StageContext& stage, const CpuCallState& state, PlanScratch& scratch) {
  const std::span<const std::int32_t> ids_TK(state.ids_TK.data(),
                                             state.num_tokens * stage.dims.routing.top_k);
  build_pull_lists(stage.dims.routing, state.counts_RE.data(), stage.buffers.rank, ids_TK,
                   kRowAlignment, scratch, stage.buffers.mine().pull_lists);
}

void stage_weights(const StageContext& stage, const CpuCallState& state) {
  std::copy_n(state.weights_TK.data(), state.num_tokens * stage.dims.routing.top_k,
              stage.buffers.mine().staged_weights_TK);
}

void fetch_forward(const StageContext& stage) {
  for_each_pull(stage, [&](int source, const PullToken& pull, const PullSlot* slots) {
    copy_row(stage, stage.buffers.symmetric_R[source].staged_rows_TH, pull, slots,
             stage.buffers.x_CH);
    note_origins(stage, source, pull, slots);
  });
}

void fetch_backward(const StageContext& stage) {
  const std::int64_t top_k = stage.dims.routing.top_k;
  for_each_pull(stage, [&](int source, const PullToken& pull, const PullSlot* slots) {
    const SymmetricBuffers& from = stage.buffers.symmetric_R[source];
    copy_row(stage, from.staged_rows_TH, pull, slots, stage.buffers.x_CH);
    copy_row(stage, from.staged_dy_TH, pull, slots, stage.buffers.dy_CH);
    note_origins(stage, source, pull, slots);
    for (std::int32_t i = 0; i < pull.num_slots; ++i) {
      const PullSlot& slot = slots[pull.first_slot + i];
      stage.buffers.weight_C[slot.row] = from.staged_weights_TK[pull.token * top_k + slot.slot];
    }
  });
}

}  // namespace megamoe::cpu
