#include "schedule/layer_model.h"

#include <algorithm>
#include <string>

#include "schedule/backward_order.h"
#include "schedule/layer_builder.h"

namespace megamoe::checker {

LayerModel::LayerModel(const LayerShape& shape, std::vector<CallSpec> calls)
    : shape_(shape), calls_(std::move(calls)) {
  for (CallSpec& call : calls_) {
    if (call.backward) call.ids = calls_[call.forward_call].ids;
    plans_.push_back(make_call_plan(shape_.dims, call));
    launches_.push_back(launches_of(call));
  }
  measure();
  add_arrays();
}

/// As forward.h and backend.cc enqueue them.
std::vector<LayerModel::Launch> LayerModel::launches_of(const CallSpec& call) const {
  using enum Launch;
  std::vector<Launch> launches;
  if (shape_.overlap) {
    launches = call.backward
                   ? std::vector{stage_and_enter, write_lists,      meet_staged, order_pulls,
                                 split_groups,    gate_up_and_pull, gradient}
                   : std::vector{stage_and_enter,  write_lists,   meet_staged,  order_pulls,
                                 gate_up_and_pull, down_and_push, meet_results, reduce};
  } else {
    launches =
        call.backward
            ? std::vector{stage_and_enter, write_lists,   meet_staged,      pull_rows,
                          gate_up,         gradient,      weight_gradients, dx,
                          push_rows,       push_dweights, meet_results,     reduce}
            : std::vector{stage_and_enter, write_lists,  meet_staged, pull_rows, gate_up, down,
                          push_rows,       meet_results, reduce};
  }
  if (call.kept != Kept::some) std::erase(launches, split_groups);
  if (call.kept != Kept::nothing && shape_.overlap) {
    std::erase(launches, gate_up_and_pull);
    std::replace(launches.begin(), launches.end(), gradient, gradient_and_pull);
  }
  if (call.backward && shape_.overlap) add_gradients_beside_rows(launches);
  swap_launches(launches);
  return launches;
}

void LayerModel::add_gradients_beside_rows(std::vector<Launch>& launches) const {
  using schedule::BackwardLaunch;
  for (const schedule::BackwardStep& step : schedule::kGradientsBesideRows) {
    if (!schedule::takes_place(step.launch, shape_.gradients_beside_dx)) continue;
    switch (step.launch) {
      case BackwardLaunch::fork:
        launches.push_back(Launch::fork_gradients);
        break;
      case BackwardLaunch::dx_and_push:
        launches.push_back(Launch::dx_and_push);
        break;
      case BackwardLaunch::gradients_beside_dx:  // begins at the fork
        break;
      case BackwardLaunch::push_dweights:
        launches.push_back(Launch::push_dweights);
        break;
      case BackwardLaunch::announce:
        launches.push_back(Launch::announce);
        break;
      case BackwardLaunch::gradients_behind_dx:
        launches.push_back(Launch::weight_gradients_beside_rows);
        break;
      case BackwardLaunch::join:
        launches.push_back(Launch::gradients_beside_dx);
        break;
      case BackwardLaunch::meet_results:
        launches.push_back(Launch::meet_results);
        break;
      case BackwardLaunch::reduce_rest:
        launches.push_back(Launch::reduce_rest);
        break;
    }
  }
}

/// What is wrong with them where a fault is seeded.
void LayerModel::swap_launches(std::vector<Launch>& launches) const {
  using enum Launch;
  const auto swap = [&](Launch a, Launch b) {
    const auto first = std::find(launches.begin(), launches.end(), a);
    const auto second = std::find(launches.begin(), launches.end(), b);
    if (first != launches.end() && second != launches.end()) std::iter_swap(first, second);
  };
  switch (shape_.fault) {
    case Fault::staged_signal_before_lists:
      swap(write_lists, meet_staged);
      break;
    case Fault::results_signal_before_push:
      swap(down_and_push, meet_results);
      break;
    case Fault::pulls_ordered_before_meeting:
      swap(meet_staged, order_pulls);
      break;
    case Fault::restaged_before_results:
      std::erase(launches, meet_results);
      std::erase(launches, reduce);
      break;
    case Fault::announced_before_push:  // dweights, whose absence is seen first, are there
      swap(dx_and_push, push_dweights);
      swap(dx_and_push, announce);
      break;
    case Fault::announced_before_dweights:
      swap(push_dweights, announce);
      break;
    case Fault::announced_by_a_push_warp:
      swap(dx_and_push, push_dweights);
      std::erase(launches, announce);
      break;
    case Fault::rest_before_weight_gradients:
      swap(weight_gradients_beside_rows, meet_results);
      swap(weight_gradients_beside_rows, reduce_rest);
      break;
    case Fault::rest_forgotten:
    case Fault::rest_beside_weight_gradients:
      std::erase(launches, reduce_rest);
      break;
    case Fault::rest_before_meeting:
      swap(meet_results, reduce_rest);
      break;
    case Fault::results_signal_before_weight_gradients:
      swap(weight_gradients_beside_rows, meet_results);
      break;
    case Fault::announced_behind_gradients:
      swap(announce, weight_gradients_beside_rows);
      break;
    case Fault::dweights_behind_gradients:
      swap(push_dweights, weight_gradients_beside_rows);
      break;
    case Fault::joined_before_announcement:
      swap(announce, gradients_beside_dx);
      swap(announce, weight_gradients_beside_rows);
      break;
    default:
      break;
  }
}

std::optional<LayerModel::Place> LayerModel::place_of(std::uint32_t index) const {
  for (std::uint32_t call = 0; call < launches_.size(); ++call) {
    if (index < launches_[call].size()) return Place{call, launches_[call][index]};
    index -= static_cast<std::uint32_t>(launches_[call].size());
  }
  return std::nullopt;
}

std::shared_ptr<const Kernel> LayerModel::kernel(std::uint32_t rank, std::uint32_t index,
                                                 const RankControl& control) const {
  const std::optional<Place> place = place_of(index);
  if (!place) return nullptr;
  Kernel kernel = Builder(*this, rank, *place, control).build();
  relate(index, *place, control.call_failed, kernel);
  return std::make_shared<const Kernel>(std::move(kernel));
}

void LayerModel::relate(std::uint32_t index, const Place& place, bool call_failed,
                        Kernel& kernel) const {
  using enum Launch;
  const std::vector<Launch>& launches = launches_[place.call];
  std::uint32_t first = index;
  while (first > 0 && place_of(first - 1)->call == place.call) --first;
  // Of a call that has failed nothing leaves, and peers may be ahead.
  const bool sends_rows =
      !call_failed &&
      (place.launch == dx_and_push || place.launch == push_dweights || place.launch == announce);
  for (std::uint32_t i = 0; shape_.overlap && i < launches.size(); ++i) {
    const bool is_beside = launches[i] == gradients_beside_dx;
    if (is_beside && place.launch == fork_gradients) kernel.forks = first + i;
    if (sends_rows && (is_beside || launches[i] == weight_gradients_beside_rows)) {
      kernel.must_not_await.push_back(first + i);
    }
  }
}

void LayerModel::expand(std::uint32_t rank, std::uint32_t index, std::uint32_t cta, Does what,
                        Registers& registers, Program& steps) const {
  Builder(*this, rank, *place_of(index), {}).go_on(cta, what, registers, steps);
}

void LayerModel::measure() {
  for (const CallPlan& plan : plans_) {
    for (const std::uint32_t num_tokens : plan.num_tokens_R) {
      max_tokens_ = std::max(max_tokens_, num_tokens);
    }
    for (const RankPlan& rank : plan.rank) {
      max_rows_ = std::max(max_rows_, static_cast<std::uint32_t>(rank.origin_C.size()));
      max_pulls_ = std::max(max_pulls_, static_cast<std::uint32_t>(rank.pulls.size()));
    }
  }
}

void LayerModel::add_arrays() {
  const auto num_ranks = static_cast<std::uint32_t>(shape_.dims.num_ranks);
  const auto top_k = static_cast<std::uint32_t>(shape_.dims.top_k);
  const std::uint32_t num_units = max_rows_ / schedule::kRowsPerUnit;
  const std::uint32_t num_h = shape_.num_h_blocks;
  hardware_.num_ranks = num_ranks;
  hardware_.ctas_per_rank = ctas_per_rank();
  hardware_.resident_ctas = shape_.resident_ctas;
  hardware_.barriers_per_cta = kBarriers;
  hardware_.shared_per_cta = kSharedData;
  hardware_.barriers.resize(std::size_t{num_ranks} * ctas_per_rank() * kBarriers);
  hardware_.deadlines_may_expire = shape_.deadlines_may_expire;
  hardware_.num_calls = static_cast<std::uint32_t>(calls_.size());
  if (shape_.fault == Fault::word_of_leaving_without_last_look) {
    hardware_.taken_for_gone = TakenForGone::by_the_word;
  } else if (shape_.fault == Fault::word_of_leaving_too_early) {
    hardware_.taken_for_gone = TakenForGone::before_it_had_left;
  }
  hardware_.signals.resize(std::size_t{4} * num_ranks * num_ranks);
  for (std::uint32_t rank = 0; rank < num_ranks; ++rank) {
    const auto global = [&](const char* name, std::uint32_t count) {
      return hardware_.memory.add_array(name, Space::global, rank, count);
    };
    Arrays arrays{};
    arrays.staged_x_Th = global("staged x", max_tokens_ * num_h);
    arrays.staged_dy_Th = global("staged dy", max_tokens_ * num_h);
    arrays.staged_weight_T = global("staged weights", max_tokens_);
    arrays.lists_R = global("pull lists", num_ranks);
    arrays.begins = global("begins of pulls", 1);
    arrays.headers_2R = global("headers", 2 * num_ranks);
    arrays.counts_2R = global("counts", 2 * num_ranks);
    arrays.plan_of_call = global("plan", static_cast<std::uint32_t>(calls_.size()));
    arrays.order_P = global("ordered pulls", max_pulls_);
    arrays.origin_C = global("origins", max_rows_);
    arrays.progress = global("number of pulls", 2);
    arrays.x_Ch = global("x rows", max_rows_ * num_h);
    arrays.dy_Ch = global("dy rows", max_rows_ * num_h);
    arrays.pad_x = global("pads of x", num_units);
    arrays.pad_dy = global("pads of dy", num_units);
    arrays.inner = global("inner rows", num_units * shape_.num_i_tiles * 2 * kPlanes);
    // Pushed by ordinary stores to another GPU; only who sums them through copies fences.
    arrays.slots_TKhb = hardware_.memory.add_array(
        "slots", Space::global, rank, max_tokens_ * top_k * num_h * kPieces, Fences::reader);
    arrays.slot_dweights_TK = global("slots of dw", max_tokens_ * top_k);
    arrays.output_Th = global("outputs", max_tokens_ * num_h);
    arrays.output_dweights_T = global("outputs of dw", max_tokens_);
    arrays.gradient_eJcb =
        global("weight gradients",
               static_cast<std::uint32_t>(shape_.dims.experts_per_rank()) * kJobs * kJobBlocks);
    arrays.shared = hardware_.memory.add_array("shared memory", Space::shared, rank,
                                               ctas_per_rank() * kSharedData);
    hardware_.shared_R.push_back(arrays.shared);
    arrays.first_counter = static_cast<std::uint32_t>(hardware_.counters.size());
    Counter counter;
    counter.rank = rank;
    hardware_.counters.resize(
        hardware_.counters.size() + kRowsArrived + max_rows_ / schedule::kRowsPerBlock, counter);
    arrays_.push_back(arrays);
  }
}

Machine LayerModel::start(const std::shared_ptr<const LayerModel>& model) {
  return Machine(model->hardware_, model);
}

void LayerModel::check_outputs(const Machine& machine) const {
  std::uint32_t last = static_cast<std::uint32_t>(calls_.size());
  // Outputs of earlier calls are overwritten.
  while (last > 0) {
    const CallSpec& call = calls_[last - 1];
    const bool bad =
        call.bad_rank >= 0 || (call.backward && calls_[call.forward_call].bad_rank >= 0);
    if (!bad) break;
    --last;
  }
  if (last == 0) return;
  for (std::uint32_t rank = 0; rank < hardware_.num_ranks; ++rank) {
    if (machine.control(rank).failed_for_good) continue;
    const Builder builder(*this, rank, {last - 1, Launch::reduce}, {});
    for (const auto& [datum, tag] : builder.results()) {
      if (machine.memory().tag(datum) == tag) continue;
      throw Violation("the last call leaves " + machine.memory().describe(datum) + " unwritten");
    }
  }
}

}  // namespace megamoe::checker
