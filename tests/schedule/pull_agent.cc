// The pull warp of a kernel that pulls: the steps of pull_role.cuh, which depend on what it takes.
#include "schedule/layer_builder.h"
#include "schedule/row_blocks.h"

namespace megamoe::checker {

std::uint32_t LayerModel::Builder::num_passes() const {
  if (!backward() || pulls_late()) return 1;
  return call().kept == Kept::all ? 1 : 2;
}

void LayerModel::Builder::pull_role(Program& steps) const {
  if (!has(Fault::pull_without_reader_fence)) steps.push_back(op(OpKind::fence));
  if (pulls_late() || place_.launch == Launch::gradient_and_pull) read_pulls_left(steps);
  if (!pulls_late()) {
    steps.push_back(op(OpKind::read, own().progress, tag(Tag::progress, rank_)));
  }
  steps.push_back(op(OpKind::take, next_pull()));
  steps.push_back(ask_again(Does::pull));
}

/// num_passes_now, and who takes what it leaves.
void LayerModel::Builder::read_pulls_left(Program& steps) const {
  const std::uint32_t taken = call().kept == Kept::some ? kPullsTaken : 0;
  steps.push_back(op(OpKind::read, own().progress + 1, tag(Tag::progress, rank_, 1, taken)));
}

std::uint32_t LayerModel::Builder::num_own_pulls() const {
  if (pulls_late() && call().kept == Kept::some) return 0;
  return static_cast<std::uint32_t>(rows().pulls.size());
}

/// PullFeed and pull_role.
void LayerModel::Builder::continue_pulls(std::uint32_t cta, Registers& registers,
                                         Program& steps) const {
  const std::uint32_t num_pulls = num_own_pulls();
  const auto look_up = [&] {
    if (has(Fault::pulls_bound_to_ctas)) {
      registers.taken = cta + registers.num_looked_up * shape().num_ctas;
    }
    ++registers.num_looked_up;
    registers.ahead =
        registers.taken < num_pulls * num_passes() ? std::int64_t{registers.taken} : -1;
    if (registers.ahead < 0) return;
    const auto pull = static_cast<std::uint32_t>(registers.ahead) % num_pulls;
    steps.push_back(op(OpKind::read, own().order_P + pull, tag(Tag::order, rank_, pull)));
  };
  if (!registers.started) {
    registers.started = true;
    look_up();
    steps.push_back(op(OpKind::take, next_pull()));
    steps.push_back(ask_again(Does::pull));
    return;
  }
  if (registers.ahead >= 0 && registers.ahead / num_pulls == registers.pass) {
    const auto pull = static_cast<std::uint32_t>(registers.ahead) % num_pulls;
    ++registers.num_taken;
    look_up();
    steps.push_back(op(OpKind::take, next_pull()));
    chunk_loads(cta, pull, registers, steps);
    steps.push_back(ask_again(Does::pull));
    return;
  }
  // PullRing::finish
  const bool signals_early = has(Fault::all_done_before_wait);
  if (signals_early && registers.pass == 0) {
    steps.push_back(op(OpKind::add, pulls_done(), 0, registers.num_taken));
  }
  store_pending(cta, registers, steps);
  steps.push_back(
      op(OpKind::wait_complete, 0, 0, has(Fault::last_row_counted_a_group_early) ? 1 : 0));
  count_stored(registers, steps);
  if (has(Fault::last_row_counted_a_group_early)) steps.push_back(op(OpKind::wait_complete));
  if (!signals_early && registers.pass == 0) {
    steps.push_back(op(OpKind::add, pulls_done(), 0, registers.num_taken));
  }
  if (++registers.pass < num_passes()) steps.push_back(ask_again(Does::pull));
}

/// move_row and PullRing::move
void LayerModel::Builder::chunk_loads(std::uint32_t cta, std::uint32_t pull_idx,
                                      Registers& registers, Program& steps) const {
  const Pull& pull = rows().pulls[pull_idx];
  const std::uint32_t num_chunks = shape().num_chunks;
  const std::uint32_t blocks_a_chunk = shape().num_h_blocks / num_chunks;
  const bool is_dy = moves_dy(registers.pass);
  const DatumId staged = is_dy ? of(pull.source).staged_dy_Th : of(pull.source).staged_x_Th;
  for (std::uint32_t chunk = 0; chunk < num_chunks; ++chunk) {
    const std::uint32_t stage = registers.num_chunks % 2;
    const std::uint32_t arrived = barrier(cta, kChunkArrived + stage);
    if (!has(Fault::chunk_reused_without_wait)) steps.push_back(op(OpKind::wait_read));
    steps.push_back(op(OpKind::arrive_expecting, arrived, 0, 1));
    for (std::uint32_t i = 0; i < blocks_a_chunk; ++i) {
      const std::uint32_t h = chunk * blocks_a_chunk + i;
      steps.push_back(op(OpKind::load_read, staged + pull.token * shape().num_h_blocks + h,
                         tag(is_dy ? Tag::staged_dy : Tag::staged_x, pull.source, pull.token, h)));
    }
    steps.push_back(op(OpKind::load_write, shared(cta, kChunkAt + stage),
                       tag(Tag::shared, rank_, pull_idx, chunk), 0, arrived));
    ++registers.num_chunks;
    store_pending(cta, registers, steps);
    registers.pending_chunk = static_cast<std::int64_t>(pull_idx) * num_chunks + chunk;
    registers.pending_pass = registers.pass;
  }
}

/// PullRing::store_pending
void LayerModel::Builder::store_pending(std::uint32_t cta, Registers& registers,
                                        Program& steps) const {
  if (registers.pending_chunk < 0) return;
  const std::uint32_t num_chunks = shape().num_chunks;
  const std::uint32_t blocks_a_chunk = shape().num_h_blocks / num_chunks;
  const Pull& pull = rows().pulls[registers.pending_chunk / num_chunks];
  const auto chunk = static_cast<std::uint32_t>(registers.pending_chunk % num_chunks);
  const bool is_dy = moves_dy(registers.pending_pass);
  const std::uint32_t number = registers.num_stored++;
  steps.push_back(
      op(OpKind::await_barrier, barrier(cta, kChunkArrived + number % 2), 0, number / 2 + 1));
  for (const std::uint32_t row : pull.rows) {
    for (std::uint32_t i = 0; i < blocks_a_chunk; ++i) {
      const std::uint32_t h = chunk * blocks_a_chunk + i;
      steps.push_back(op(OpKind::store, shared(cta, kChunkAt + number % 2),
                         row_tag(is_dy ? Tag::staged_dy : Tag::staged_x, row, h), 0,
                         is_dy ? dy(row, h) : x(row, h)));
    }
  }
  steps.push_back(op(OpKind::commit));
  const bool stored_completes = !pulls_late() && registers.stored_chunk >= 0 &&
                                registers.stored_pass == 0 &&
                                registers.stored_chunk % num_chunks == num_chunks - 1;
  if (stored_completes) {
    if (has(Fault::counted_after_read_wait)) {
      steps.push_back(op(OpKind::wait_read, 0, 0, 1));
    } else if (!has(Fault::row_counted_before_wait)) {
      steps.push_back(op(OpKind::wait_complete, 0, 0, has(Fault::counted_a_group_early) ? 2 : 1));
    }
    count_stored(registers, steps);
  }
  registers.stored_chunk = registers.pending_chunk;
  registers.stored_pass = registers.pending_pass;
  registers.pending_chunk = -1;
}

/// PullRing::count_row by every lane that stored one.
void LayerModel::Builder::count_stored(Registers& registers, Program& steps) const {
  const std::uint32_t num_chunks = shape().num_chunks;
  const bool completes = registers.stored_chunk >= 0 && registers.stored_pass == 0 &&
                         registers.stored_chunk % num_chunks == num_chunks - 1;
  if (!completes || pulls_late()) {
    registers.stored_chunk = -1;
    return;
  }
  const auto pull_idx = static_cast<std::uint32_t>(registers.stored_chunk / num_chunks);
  bool drops = has(Fault::row_not_counted) && pull_idx == 0;
  for (const std::uint32_t row : rows().pulls[pull_idx].rows) {
    const std::uint32_t counter =
        rows_arrived(static_cast<std::uint32_t>(schedule::block_of_row(static_cast<int>(row))));
    if (!std::exchange(drops, false)) steps.push_back(op(OpKind::add, counter, 0, 1));
    if (has(Fault::row_counted_twice) && pull_idx == 0) {
      steps.push_back(op(OpKind::add, counter, 0, 1));
    }
  }
  registers.stored_chunk = -1;
}

}  // namespace megamoe::checker
