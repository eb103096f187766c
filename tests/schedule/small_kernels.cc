// The kernels around the products: staging, plan, rendezvous, order of pulls, exchange without
// overlap.
#include "schedule/layer_builder.h"
#include "schedule/row_blocks.h"

namespace megamoe::checker {
LayerModel::Builder::Builder(const LayerModel& model, std::uint32_t rank, Place place,
                             const RankControl& control)
    : model_(model), rank_(rank), place_(place), control_(control) {}

Kernel LayerModel::Builder::build() {
  const std::uint32_t i_tiles = shape().num_i_tiles;
  const std::uint32_t h_tiles = shape().num_h_blocks;
  const int gate_up_pieces = backward() ? 3 : 1;
  switch (place_.launch) {
    case Launch::stage_and_enter:
      kernel_.name = "stage beside enter_call";
      stage();
      enter();
      break;
    case Launch::split_groups:
      split_groups();
      break;
    case Launch::write_lists:
      write_lists();
      break;
    case Launch::meet_staged:
      meet(kRowsStaged, "meet(rows_staged)");
      break;
    case Launch::meet_results:
      meet(kResultsSent, "meet(results_sent)");
      break;
    case Launch::order_pulls:
      order_pulls();
      break;
    case Launch::pull_rows:
      pull_rows();
      break;
    case Launch::push_rows:
      push_rows();
      break;
    case Launch::push_dweights:
      push_dweights();
      break;
    case Launch::announce:
      announce();
      break;
    case Launch::reduce:
      reduce();
      break;
    case Launch::reduce_rest:
      reduce_rest();
      break;
    case Launch::weight_gradients:
      weight_gradients();
      break;
    case Launch::weight_gradients_beside_rows:
      weight_gradients_beside_rows(0, "weight_gradients_beside_rows");
      break;
    case Launch::gate_up_and_pull:
      product({"gate_up_and_pull", i_tiles, gate_up_pieces, true, false});
      break;
    case Launch::gradient_and_pull:
      product({"gate_up_gradient_and_pull", i_tiles, 3, true, false});
      break;
    case Launch::down_and_push:
      product({"down_and_push", h_tiles, 2, false, true});
      break;
    case Launch::dx_and_push:
      product({"dx_and_push", h_tiles, 2, false, true});
      break;
    case Launch::fork_gradients:
      break;
    case Launch::gradients_beside_dx:
      weight_gradients_beside_rows(shape().num_ctas, "weight_gradients_beside_rows beside dx");
      break;
    case Launch::gate_up:
      product({"gate_up", i_tiles, gate_up_pieces, false, false});
      break;
    case Launch::gradient:
      plain_product({"gate_up_gradient", i_tiles, 3});
      break;
    case Launch::down:
      plain_product({"down", h_tiles, 2});
      break;
    case Launch::dx:
      plain_product({"dx", h_tiles, 2});
      break;
  }
  std::erase_if(kernel_.agents, [](const AgentProgram& agent) { return agent.steps.empty(); });
  return std::move(kernel_);
}

std::uint64_t LayerModel::Builder::tag(Tag kind, std::uint32_t rank, std::uint32_t b,
                                       std::uint32_t c) const {
  return static_cast<std::uint64_t>(kind) << 59 | static_cast<std::uint64_t>(place_.call) << 50 |
         static_cast<std::uint64_t>(rank) << 42 | static_cast<std::uint64_t>(b) << 18 |
         static_cast<std::uint64_t>(c) << 1;
}

DatumId LayerModel::Builder::x(std::uint32_t row, std::uint32_t h) const {
  return own().x_Ch + row * shape().num_h_blocks + h;
}
DatumId LayerModel::Builder::dy(std::uint32_t row, std::uint32_t h) const {
  return own().dy_Ch + row * shape().num_h_blocks + h;
}
DatumId LayerModel::Builder::slot(const RowOrigin& origin, std::uint32_t h,
                                  std::uint32_t piece) const {
  const auto slot =
      static_cast<std::uint32_t>(origin.token) * top_k() + static_cast<std::uint32_t>(origin.slot);
  return of(static_cast<std::uint32_t>(origin.rank)).slots_TKhb +
         (slot * shape().num_h_blocks + h) * kPieces + piece;
}
std::uint64_t LayerModel::Builder::slot_tag(const RowOrigin& origin, std::uint32_t h,
                                            std::uint32_t piece) const {
  const auto slot =
      static_cast<std::uint32_t>(origin.token) * top_k() + static_cast<std::uint32_t>(origin.slot);
  return tag(Tag::slot, static_cast<std::uint32_t>(origin.rank), slot, h * kPieces + piece);
}
std::uint32_t LayerModel::Builder::signal(std::uint32_t what, std::uint32_t at,
                                          std::uint32_t from) const {
  return (what * num_ranks() + at) * num_ranks() + from;
}
std::uint32_t LayerModel::Builder::rows_arrived(std::uint32_t block) const {
  return counter(kRowsArrived) + block;
}
/// A row holds what its source staged.
std::uint64_t LayerModel::Builder::row_tag(Tag kind, std::uint32_t row, std::uint32_t h) const {
  const RowOrigin& origin = rows().origin_C[row];
  return tag(kind, static_cast<std::uint32_t>(origin.rank),
             static_cast<std::uint32_t>(origin.token), h);
}

Program& LayerModel::Builder::agent(std::uint32_t cta, std::string role) {
  kernel_.agents.push_back({std::move(role), cta, {}});
  return kernel_.agents.back().steps;
}

void LayerModel::Builder::on_all_ctas(const char* role,
                                      const std::function<void(std::uint32_t, Program&)>& body) {
  for (std::uint32_t cta = 0; cta < shape().num_ctas; ++cta) body(cta, agent(cta, role));
}

/// stage.cu
void LayerModel::Builder::stage() {
  if (control_.failed_for_good) return;
  on_all_ctas("mover", [&](std::uint32_t cta, Program& steps) {
    if (has(Fault::fence_before_stores)) steps.push_back(op(OpKind::fence));
    for (std::uint32_t token = cta; token < num_tokens(); token += shape().num_ctas) {
      for (std::uint32_t h = 0; h < shape().num_h_blocks; ++h) {
        const std::uint32_t at = token * shape().num_h_blocks + h;
        steps.push_back(
            op(OpKind::write, own().staged_x_Th + at, tag(Tag::staged_x, rank_, token, h)));
        if (!backward()) continue;
        steps.push_back(
            op(OpKind::write, own().staged_dy_Th + at, tag(Tag::staged_dy, rank_, token, h)));
      }
      if (!backward()) continue;
      steps.push_back(
          op(OpKind::write, own().staged_weight_T + token, tag(Tag::staged_weight, rank_, token)));
    }
    if (has(Fault::fence_before_stores) || has(Fault::stage_without_writer_fence)) return;
    if (!steps.empty()) steps.push_back(op(OpKind::fence));
  });
}

/// enter_call.cu
void LayerModel::Builder::enter() {
  Program& steps = agent(0, "all");
  const std::uint32_t epoch = has(Fault::epoch_reused) ? 1 : control_.epoch + 1;
  const std::uint32_t half = has(Fault::headers_not_doubled) ? 0 : epoch % 2;
  const bool is_bad = call().bad_rank == static_cast<std::int32_t>(rank_) ||
                      (backward() && model_.calls_[call().forward_call].bad_rank >= 0);
  steps.push_back(op(OpKind::begin_call, 0, 0, epoch));
  if (has(Fault::entered_signal_early)) send_to_all(kEntered, steps);
  // A rank that has failed for good waits for nobody, so a peer may still read what it was told.
  const bool tells = !control_.failed_for_good || has(Fault::failed_rank_tells);
  for (std::uint32_t step = 0; tells && step < num_ranks(); ++step) {
    const std::uint32_t peer = (rank_ + step) % num_ranks();
    const std::uint32_t at = half * num_ranks() + rank_;
    if (!backward()) {
      steps.push_back(op(OpKind::write, of(peer).counts_2R + at, tag(Tag::counts, rank_, peer)));
    }
    steps.push_back(op(OpKind::write, of(peer).headers_2R + at,
                       tag(Tag::header, rank_, peer) | (is_bad ? kBadCall : 0)));
  }
  if (!has(Fault::entered_signal_early)) send_to_all(kEntered, steps);
  if (control_.failed_for_good) return;
  for (std::uint32_t peer = 0; peer < num_ranks(); ++peer) {
    steps.push_back(op(OpKind::await_signal, signal(kEntered, rank_, peer), 0, epoch));
  }
  steps.push_back(op(OpKind::end_if_failed));
  for (std::uint32_t peer = 0; peer < num_ranks(); ++peer) {
    const bool bad = call().bad_rank == static_cast<std::int32_t>(peer) ||
                     (backward() && model_.calls_[call().forward_call].bad_rank >= 0);
    steps.push_back(op(OpKind::judge_header, own().headers_2R + half * num_ranks() + peer,
                       tag(Tag::header, peer, rank_) | (bad ? kBadCall : 0)));
  }
  steps.push_back(op(OpKind::end_if_failed));
  const DatumId plan = own().plan_of_call + (backward() ? call().forward_call : place_.call);
  for (std::uint32_t peer = 0; peer < num_ranks() && !backward(); ++peer) {
    steps.push_back(op(OpKind::read, own().counts_2R + half * num_ranks() + peer,
                       tag(Tag::counts, peer, rank_)));
  }
  steps.push_back(op(OpKind::write, plan, tag(Tag::plan, rank_)));
  steps.push_back(op(OpKind::write, own().begins, tag(Tag::begins, rank_)));
}

/// pull_lists.cu
void LayerModel::Builder::write_lists() {
  kernel_.name = "write_pull_lists";
  if (control_.call_failed || num_tokens() == 0) return;
  on_all_ctas("planner", [&](std::uint32_t cta, Program& steps) {
    for (std::uint32_t peer = cta; peer < num_ranks(); peer += shape().num_ctas) {
      steps.push_back(op(OpKind::write, own().lists_R + peer, tag(Tag::lists, rank_, peer)));
    }
  });
}

/// meet.cu
void LayerModel::Builder::meet(std::uint32_t what, const char* name) {
  kernel_.name = name;
  Program& steps = agent(0, "all");
  send_to_all(what, steps);
  if (control_.call_failed) return;
  for (std::uint32_t peer = 0; peer < num_ranks(); ++peer) {
    steps.push_back(op(OpKind::await_signal, signal(what, rank_, peer), 0, control_.epoch));
  }
}

/// meet.cu
void LayerModel::Builder::announce() {
  kernel_.name = "announce(gradients_sent)";
  send_to_all(kGradientsSent, agent(0, "all"));
}

/// The fault is that rank 0 does not send the signal to its last peer.
bool LayerModel::Builder::is_dropped(std::uint32_t what) const {
  switch (what) {
    case kEntered:
      return has(Fault::entered_signal_dropped);
    case kRowsStaged:
      return has(Fault::staged_signal_dropped);
    case kGradientsSent:
      return has(Fault::announcement_dropped);
    default:
      return has(Fault::results_signal_dropped);
  }
}

void LayerModel::Builder::send_to_all(std::uint32_t what, Program& steps) const {
  for (std::uint32_t step = 0; step < num_ranks(); ++step) {
    const std::uint32_t peer = (rank_ + step) % num_ranks();
    if (is_dropped(what) && rank_ == 0 && step == num_ranks() - 1) continue;
    steps.push_back(op(OpKind::send_signal, signal(what, peer, rank_)));
  }
}

/// pull_role.cuh: rows between the experts.
void LayerModel::Builder::clear_pads(std::uint32_t cta, Program& steps) const {
  for (std::uint32_t expert = cta; expert < num_experts(); expert += shape().num_ctas) {
    const std::int32_t ragged = rows().count_e[expert] % schedule::kRowsPerUnit;
    if (ragged == 0) continue;
    const auto row = static_cast<std::uint32_t>(rows().begin_e[expert] + rows().count_e[expert]);
    const std::uint32_t unit = row / schedule::kRowsPerUnit;
    steps.push_back(op(OpKind::write, own().pad_x + unit, tag(Tag::pad_x, rank_, unit)));
    if (!backward()) continue;
    steps.push_back(op(OpKind::write, own().pad_dy + unit, tag(Tag::pad_dy, rank_, unit)));
  }
}

/// order_pulls.cu
void LayerModel::Builder::order_pulls() {
  kernel_.name = "order_pulls";
  if (control_.call_failed) return;
  on_all_ctas("mover", [&](std::uint32_t cta, Program& steps) { order_on(cta, steps); });
}

void LayerModel::Builder::order_on(std::uint32_t cta, Program& steps) {
  const bool starts = !has(Fault::counters_not_started_again) || place_.call == 0;
  const DatumId plan = own().plan_of_call + (backward() ? call().forward_call : place_.call);
  steps.push_back(op(OpKind::read, plan, tag(Tag::plan, rank_)));
  for (std::uint32_t peer = 0; peer < num_ranks(); ++peer) {
    steps.push_back(op(OpKind::read, of(peer).begins, tag(Tag::begins, peer)));
  }
  if (cta == 0) {
    steps.push_back(op(OpKind::write, own().progress, tag(Tag::progress, rank_)));
    steps.push_back(op(OpKind::write, own().progress + 1, tag(Tag::progress, rank_, 1)));
    const auto start = [&](std::uint32_t number, Fault forgotten) {
      if (has(forgotten) && place_.call != 0) return;
      steps.push_back(op(OpKind::start_counter, counter(number)));
    };
    start(kNextPull, Fault::pulls_not_started_again);
    start(kPullsDone, Fault::pulls_not_started_again);
    start(kNextPullOfX, Fault::x_pulls_not_started_again);
    start(kPullsOfXDone, Fault::x_pulls_not_started_again);
    start(kNumReduced, Fault::reduced_not_started_again);
  }
  for (std::uint32_t expert = cta; starts && expert < num_experts(); expert += shape().num_ctas) {
    const std::int32_t count = rows().count_e[expert];
    const int first = schedule::block_of_row(rows().begin_e[expert]);
    for (int block = 0; block * schedule::kRowsPerBlock < count; ++block) {
      const int num_pads = schedule::num_pads_of_block(count, block);
      steps.push_back(op(OpKind::start_counter,
                         rows_arrived(static_cast<std::uint32_t>(first + block)), 0,
                         static_cast<std::uint32_t>(num_pads)));
    }
  }
  for (std::uint32_t i = cta; i < rows().pulls.size(); i += shape().num_ctas) {
    const Pull& pull = rows().pulls[i];
    steps.push_back(
        op(OpKind::read, of(pull.source).lists_R + rank_, tag(Tag::lists, pull.source, rank_)));
    steps.push_back(op(OpKind::write, own().order_P + i, tag(Tag::order, rank_, i)));
    if (backward()) {
      steps.push_back(op(OpKind::read, of(pull.source).staged_weight_T + pull.token,
                         tag(Tag::staged_weight, pull.source, pull.token)));
    }
    for (const std::uint32_t row : pull.rows) {
      steps.push_back(op(OpKind::write, own().origin_C + row, tag(Tag::origin, rank_, row)));
    }
  }
  clear_pads(cta, steps);
  if (!has(Fault::pads_without_writer_fence)) steps.push_back(op(OpKind::fence));
}

/// split_groups.cu: some rows need x before the weight gradients do.
void LayerModel::Builder::split_groups() {
  kernel_.name = "split_groups";
  if (control_.call_failed) return;
  agent(0, "all").push_back(
      op(OpKind::write, own().progress + 1, tag(Tag::progress, rank_, 1, kPullsTaken)));
}

/// pull.cu
void LayerModel::Builder::pull_rows() {
  kernel_.name = "pull_rows";
  if (control_.call_failed) return;
  on_all_ctas("mover", [&](std::uint32_t cta, Program& steps) {
    for (std::uint32_t i = cta; i < rows().pulls.size(); i += shape().num_ctas) {
      const Pull& pull = rows().pulls[i];
      steps.push_back(op(OpKind::read, of(pull.source).begins, tag(Tag::begins, pull.source)));
      steps.push_back(
          op(OpKind::read, of(pull.source).lists_R + rank_, tag(Tag::lists, pull.source, rank_)));
      for (std::uint32_t h = 0; h < shape().num_h_blocks; ++h) {
        const std::uint32_t at = pull.token * shape().num_h_blocks + h;
        const std::uint64_t x_tag = tag(Tag::staged_x, pull.source, pull.token, h);
        const std::uint64_t dy_tag = tag(Tag::staged_dy, pull.source, pull.token, h);
        steps.push_back(op(OpKind::read, of(pull.source).staged_x_Th + at, x_tag));
        if (backward())
          steps.push_back(op(OpKind::read, of(pull.source).staged_dy_Th + at, dy_tag));
        for (const std::uint32_t row : pull.rows) {
          steps.push_back(op(OpKind::write, x(row, h), x_tag));
          if (backward()) steps.push_back(op(OpKind::write, dy(row, h), dy_tag));
        }
      }
      for (const std::uint32_t row : pull.rows) {
        steps.push_back(op(OpKind::write, own().origin_C + row, tag(Tag::origin, rank_, row)));
      }
    }
    clear_pads(cta, steps);
    steps.push_back(op(OpKind::fence));
  });
}

/// push.cu
void LayerModel::Builder::push_rows() {
  kernel_.name = "push_rows";
  if (control_.call_failed) return;
  on_all_ctas("mover", [&](std::uint32_t cta, Program& steps) {
    for (std::uint32_t row = cta; row < rows().origin_C.size(); row += shape().num_ctas) {
      const RowOrigin& origin = rows().origin_C[row];
      if (origin.rank < 0) continue;
      steps.push_back(op(OpKind::read, own().origin_C + row, tag(Tag::origin, rank_, row)));
      for (std::uint32_t h = 0; h < shape().num_h_blocks; ++h) {
        steps.push_back(backward() ? op(OpKind::read, x(row, h), row_tag(Tag::dx_row, row, h))
                                   : op(OpKind::read, dy(row, h), row_tag(Tag::o_row, row, h)));
        for (std::uint32_t piece = 0; piece < kPieces; ++piece) {
          steps.push_back(op(OpKind::write, slot(origin, h, piece), slot_tag(origin, h, piece)));
        }
      }
    }
  });
}

void LayerModel::Builder::push_dweights() {
  kernel_.name = "push_dweights";
  if (control_.call_failed) return;
  on_all_ctas("mover", [&](std::uint32_t cta, Program& steps) {
    for (std::uint32_t row = cta; row < rows().origin_C.size(); row += shape().num_ctas) {
      const RowOrigin& origin = rows().origin_C[row];
      if (origin.rank < 0) continue;
      const auto to = static_cast<std::uint32_t>(origin.rank);
      const auto at = static_cast<std::uint32_t>(origin.token) * top_k() +
                      static_cast<std::uint32_t>(origin.slot);
      steps.push_back(op(OpKind::read, own().origin_C + row, tag(Tag::origin, rank_, row)));
      steps.push_back(
          op(OpKind::write, of(to).slot_dweights_TK + at, tag(Tag::slot_dweight, to, at)));
    }
  });
}

}  // namespace megamoe::checker
