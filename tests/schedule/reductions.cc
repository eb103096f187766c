// The sums over a token's slots: by a kernel (reduce.cu), beside the weight gradients
// (reduce_role.cuh), and by a kernel of what they leave.
//
// Legend: h blocks of the hidden dimension; a part is one of them of up to kSlotsAPart slots.
#include <algorithm>

#include "schedule/layer_builder.h"
#include "schedule/row_blocks.h"

namespace megamoe::checker {
namespace {

/// Eight in the kernel; fewer here, so that sums of several parts are common.
constexpr std::uint32_t kSlotsAPart = 2;
constexpr std::uint32_t kBuffers = 2;

std::uint32_t num_groups(std::size_t num_slots) {
  const auto slots = static_cast<std::uint32_t>(num_slots);
  return std::max(1U, (slots + kSlotsAPart - 1) / kSlotsAPart);
}

}  // namespace

void LayerModel::Builder::go_on(std::uint32_t cta, Does what, Registers& registers,
                                Program& steps) const {
  switch (what) {
    case Does::pull:
      continue_pulls(cta, registers, steps);
      break;
    case Does::reduce:
      continue_reduction(cta, registers, steps);
      break;
    case Does::reduce_rest:
      continue_rest(cta, registers, steps);
      break;
  }
}

std::vector<std::pair<DatumId, std::uint64_t>> LayerModel::Builder::results() const {
  std::vector<std::pair<DatumId, std::uint64_t>> results;
  for (std::uint32_t token = 0; token < num_tokens(); ++token) {
    for (std::uint32_t h = 0; h < shape().num_h_blocks; ++h) {
      results.emplace_back(own().output_Th + token * shape().num_h_blocks + h,
                           tag(Tag::output, rank_, token, h));
    }
    if (!backward()) continue;
    results.emplace_back(own().output_dweights_T + token, tag(Tag::output_dweight, rank_, token));
  }
  for (std::uint32_t expert = 0; backward() && expert < num_experts(); ++expert) {
    for (std::uint32_t i = 0; i < kJobs * kJobBlocks; ++i) {
      results.push_back(gradient(expert, i / kJobBlocks, i % kJobBlocks));
    }
  }
  return results;
}

std::vector<RowOrigin> LayerModel::Builder::filled_slots(std::uint32_t token) const {
  std::vector<RowOrigin> slots;
  for (std::uint32_t k = 0; k < top_k(); ++k) {
    if (call().ids[rank_][token * top_k() + k] < 0) continue;
    slots.push_back({static_cast<std::int32_t>(rank_), static_cast<std::int32_t>(token),
                     static_cast<std::int32_t>(k)});
  }
  return slots;
}

void LayerModel::Builder::reduce_dweights(std::uint32_t token, Program& steps) const {
  for (const RowOrigin& origin : filled_slots(token)) {
    const std::uint32_t at = token * top_k() + static_cast<std::uint32_t>(origin.slot);
    steps.push_back(
        op(OpKind::read, own().slot_dweights_TK + at, tag(Tag::slot_dweight, rank_, at)));
  }
  steps.push_back(
      op(OpKind::write, own().output_dweights_T + token, tag(Tag::output_dweight, rank_, token)));
}

/// reduce.cu
void LayerModel::Builder::reduce_part(std::uint32_t token, std::uint32_t h, Program& steps) const {
  if (backward() && h == 0) reduce_dweights(token, steps);
  for (const RowOrigin& origin : filled_slots(token)) {
    for (std::uint32_t piece = 0; piece < kPieces; ++piece) {
      steps.push_back(op(OpKind::read, slot(origin, h, piece), slot_tag(origin, h, piece)));
    }
  }
  steps.push_back(op(OpKind::write, own().output_Th + token * shape().num_h_blocks + h,
                     tag(Tag::output, rank_, token, h)));
}

void LayerModel::Builder::reduce() {
  kernel_.name = "reduce";
  if (control_.call_failed) return;
  on_all_ctas("reducer",
              [&](std::uint32_t cta, Program& steps) { continue_rest(cta, Registers{}, steps); });
}

void LayerModel::Builder::reduce_rest() {
  kernel_.name = "reduce_other_gradients";
  if (control_.call_failed || num_tokens() == 0) return;
  on_all_ctas("reducer", [&](std::uint32_t /*cta*/, Program& steps) {
    steps.push_back(op(OpKind::read_counter, counter(kNumReduced)));
    steps.push_back(ask_again(Does::reduce_rest));
  });
}

/// From the first token that nobody has taken.
void LayerModel::Builder::continue_rest(std::uint32_t cta, const Registers& registers,
                                        Program& steps) const {
  const std::uint32_t num_h = shape().num_h_blocks;
  const std::uint32_t num_done = has(Fault::rest_from_zero) ? 0 : registers.taken;
  for (std::uint32_t block = num_done * num_h + cta; block < num_tokens() * num_h;
       block += shape().num_ctas) {
    reduce_part(block / num_h, block % num_h, steps);
  }
}

/// reduce_role behind gradients_arrive. That a CTA's loads are done may be seen at any time.
void LayerModel::Builder::reduce_beside(Program& steps) const {
  if (!has(Fault::reduce_without_reader_fence)) steps.push_back(op(OpKind::fence));
  steps.push_back(op(OpKind::take_or_leave, counter(kNumReduced)));
  steps.push_back(ask_again(Does::reduce));
  if (!has(Fault::rest_beside_weight_gradients)) return;
  steps.push_back(op(OpKind::read_counter, counter(kNumReduced)));
  steps.push_back(ask_again(Does::reduce_rest));
}

/// ReduceRing::reduce_token
void LayerModel::Builder::continue_reduction(std::uint32_t cta, Registers& registers,
                                             Program& steps) const {
  const std::uint32_t token = registers.taken;
  if (token >= num_tokens()) return;
  steps.push_back(op(OpKind::take_or_leave, counter(kNumReduced)));
  reduce_dweights(token, steps);
  const std::uint32_t groups = num_groups(filled_slots(token).size());
  const std::uint32_t num_parts = shape().num_h_blocks * groups;
  const std::uint32_t most_ahead = has(Fault::reduce_buffer_refilled_early) ? 2 : 1;
  const std::uint32_t first = registers.num_parts;
  std::uint32_t ahead = 0;
  for (std::uint32_t part = 0; part < num_parts; ++part) {
    for (; ahead < std::min(num_parts, part + most_ahead + 1); ++ahead) {
      load_part(cta, token, ahead, registers, steps);
    }
    add_part(cta, token, part, first + part, steps);
    if (part % groups != groups - 1) continue;
    const std::uint32_t h = part / groups;
    steps.push_back(op(OpKind::write, own().output_Th + token * shape().num_h_blocks + h,
                       tag(Tag::output, rank_, token, h)));
  }
  steps.push_back(ask_again(Does::reduce));
}

/// TokenParts::load. The lanes' copies complete together and are one here.
void LayerModel::Builder::load_part(std::uint32_t cta, std::uint32_t token, std::uint32_t part,
                                    Registers& registers, Program& steps) const {
  const std::vector<RowOrigin> slots = filled_slots(token);
  const std::uint32_t buffer = registers.num_parts++ % kBuffers;
  const std::uint32_t arrived = barrier(cta, kSlotsArrived + buffer);
  const std::uint32_t groups = num_groups(slots.size());
  steps.push_back(op(OpKind::arrive_expecting, arrived, 0, slots.empty() ? 0 : 1));
  if (slots.empty()) return;
  const std::size_t first = std::size_t{part % groups} * kSlotsAPart;
  for (std::size_t i = first; i < std::min(slots.size(), first + kSlotsAPart); ++i) {
    for (std::uint32_t piece = 0; piece < kPieces; ++piece) {
      const std::uint32_t h = part / groups;
      steps.push_back(
          op(OpKind::load_read, slot(slots[i], h, piece), slot_tag(slots[i], h, piece)));
    }
  }
  steps.push_back(op(OpKind::load_write, shared(cta, kChunkAt + buffer),
                     tag(Tag::shared, rank_, token, part), 0, arrived));
}

/// ReduceRing::add of the warp's `number`-th part, from 0.
void LayerModel::Builder::add_part(std::uint32_t cta, std::uint32_t token, std::uint32_t part,
                                   std::uint32_t number, Program& steps) const {
  const std::uint32_t buffer = number % kBuffers;
  if (!has(Fault::reduce_buffer_without_wait)) {
    steps.push_back(
        op(OpKind::await_barrier, barrier(cta, kSlotsArrived + buffer), 0, number / kBuffers + 1));
  }
  if (!filled_slots(token).empty()) {
    steps.push_back(
        op(OpKind::read, shared(cta, kChunkAt + buffer), tag(Tag::shared, rank_, token, part)));
  }
  if (!has(Fault::reduce_buffer_without_fence)) steps.push_back(op(OpKind::fence_shared));
}

}  // namespace megamoe::checker
