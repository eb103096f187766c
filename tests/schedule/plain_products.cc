// What products read and write, and the products whose inside is not modelled: one agent a CTA
// loads a tile, waits for it, and stores the results.
#include <algorithm>

#include "schedule/layer_builder.h"
#include "schedule/row_blocks.h"

namespace megamoe::checker {
namespace {

using schedule::GroupedTile;
using schedule::RowRange;

constexpr std::uint32_t kUnit = schedule::kRowsPerUnit;
/// Inner rows: what gate_up leaves, and what its gradient makes of them.
constexpr std::uint32_t kActivations = 0;
constexpr std::uint32_t kGradients = 1;

}  // namespace

DatumId LayerModel::Builder::inner(std::uint32_t unit, std::uint32_t column,
                                   std::uint32_t plane) const {
  return own().inner + (unit * shape().num_i_tiles * 2 + column) * kPlanes + plane;
}

std::uint64_t LayerModel::Builder::inner_tag(std::uint32_t stage, std::uint32_t unit,
                                             std::uint32_t column, std::uint32_t plane) const {
  return tag(Tag::inner, rank_, unit, (column * kPlanes + plane) * 2 + stage);
}

/// Rows of x or dy with the pads that lie among them.
void LayerModel::Builder::read_rows(Tag kind, RowRange range, std::uint32_t h,
                                    Program& steps) const {
  const bool is_dy = kind == Tag::staged_dy;
  for (int i = range.first; i < range.first + range.count; ++i) {
    const auto row = static_cast<std::uint32_t>(i);
    if (rows().origin_C[row].rank >= 0) {
      steps.push_back(op(OpKind::load_read, is_dy ? dy(row, h) : x(row, h), row_tag(kind, row, h)));
      continue;
    }
    const std::uint32_t unit = row / kUnit;
    if (row % kUnit != 0 && i > range.first && rows().origin_C[row - 1].rank < 0) continue;
    steps.push_back(op(OpKind::load_read, (is_dy ? own().pad_dy : own().pad_x) + unit,
                       tag(is_dy ? Tag::pad_dy : Tag::pad_x, rank_, unit)));
  }
}

void LayerModel::Builder::read_inner(std::uint32_t stage, RowRange range, std::uint32_t column,
                                     std::uint32_t plane, Program& steps) const {
  if (range.count == 0) return;
  const std::uint32_t first = static_cast<std::uint32_t>(range.first) / kUnit;
  const std::uint32_t end =
      (static_cast<std::uint32_t>(range.first + range.count) + kUnit - 1) / kUnit;
  for (std::uint32_t unit = first; unit < end; ++unit) {
    steps.push_back(
        op(OpKind::load_read, inner(unit, column, plane), inner_tag(stage, unit, column, plane)));
  }
}

void LayerModel::Builder::read_operand(RowRange range, std::uint32_t k_block,
                                       Program& steps) const {
  const std::uint32_t num_k = shape().num_k_blocks;
  const std::uint32_t num_columns = shape().num_i_tiles * 2;
  const std::uint32_t h = k_block * shape().num_h_blocks / num_k;
  switch (place_.launch) {
    case Launch::gate_up:
    case Launch::gate_up_and_pull:
      read_rows(Tag::staged_x, range, h, steps);
      break;
    case Launch::gradient:
    case Launch::gradient_and_pull:
      read_rows(Tag::staged_dy, range, h, steps);
      break;
    case Launch::down:
    case Launch::down_and_push:
      read_inner(kActivations, range, k_block * num_columns / num_k, 0, steps);
      break;
    default:  // dx: all of dg, then all of du
      read_inner(kGradients, range, k_block * 2 * num_columns / num_k % num_columns,
                 1 + k_block * 2 / num_k, steps);
      break;
  }
}

void LayerModel::Builder::outputs(const GroupedTile& tile, std::uint32_t warpgroup,
                                  std::uint32_t piece,
                                  std::vector<std::pair<DatumId, std::uint64_t>>& to) const {
  const auto channel = static_cast<std::uint32_t>(tile.channel_tile);
  const std::uint32_t first = static_cast<std::uint32_t>(tile.first_row) / kUnit;
  const std::uint32_t end = first + static_cast<std::uint32_t>(tile.num_units);
  const bool is_dx = place_.launch == Launch::dx;
  if (is_dx || place_.launch == Launch::down) {
    if (channel >= shape().num_h_blocks || piece != 0 || warpgroup != 0) return;
    for (std::uint32_t row = first * kUnit; row < end * kUnit; ++row) {
      if (rows().origin_C[row].rank < 0) continue;
      to.emplace_back(is_dx ? x(row, channel) : dy(row, channel),
                      row_tag(is_dx ? Tag::dx_row : Tag::o_row, row, channel));
    }
    return;
  }
  if (channel >= shape().num_i_tiles) return;
  const bool is_gradient =
      place_.launch == Launch::gradient || place_.launch == Launch::gradient_and_pull;
  const std::uint32_t stage = is_gradient ? kGradients : kActivations;
  const std::uint32_t column = channel * 2 + warpgroup;
  for (std::uint32_t unit = first; unit < end; ++unit) {
    to.emplace_back(inner(unit, column, piece), inner_tag(stage, unit, column, piece));
  }
}

void LayerModel::Builder::plain_product(const Product& product) {
  kernel_.name = product.name;
  if (control_.call_failed) return;
  for (std::uint32_t cta = 0; cta < shape().num_ctas; ++cta) {
    Program& steps = agent(cta, "multiplies");
    const std::uint32_t filled = barrier(cta, kStageFilled);
    std::uint32_t load = 0;
    for (const GroupedTile& tile : tiles(cta, product.num_channel_tiles)) {
      if (tile.num_units == 0) continue;
      const RowRange whole{tile.first_row, tile.num_units * schedule::kRowsPerUnit};
      steps.push_back(op(OpKind::arrive_expecting, filled, 0, 1));
      for (std::uint32_t k = 0; k < shape().num_k_blocks; ++k) read_operand(whole, k, steps);
      const bool in_place = place_.launch == Launch::gradient;
      for (std::uint32_t column = 0; in_place && column < 2; ++column) {
        const std::uint32_t at = static_cast<std::uint32_t>(tile.channel_tile) * 2 + column;
        if (at >= shape().num_i_tiles * 2) continue;
        for (std::uint32_t plane = 1; plane < kPlanes; ++plane) {
          read_inner(kActivations, whole, at, plane, steps);
        }
      }
      steps.push_back(op(OpKind::load_write, shared(cta, kStageAt),
                         tag(Tag::shared, rank_, load, 0), 0, filled));
      steps.push_back(op(OpKind::await_barrier, filled, 0, ++load));
      std::vector<std::pair<DatumId, std::uint64_t>> to;
      for (std::uint32_t warpgroup = 0; warpgroup < 2; ++warpgroup) {
        for (int piece = 0; piece < product.pieces_per_warpgroup; ++piece) {
          outputs(tile, warpgroup, static_cast<std::uint32_t>(piece), to);
        }
      }
      steps.push_back(
          op(OpKind::write, shared(cta, kSlotAt), tag(Tag::shared, rank_, load, 1), 0, 1));
      steps.push_back(op(OpKind::fence_shared));
      for (const auto& [datum, datum_tag] : to) {
        steps.push_back(op(OpKind::store, shared(cta, kSlotAt), datum_tag, 0, datum));
      }
      steps.push_back(op(OpKind::commit));
      steps.push_back(op(OpKind::wait_read));
    }
    steps.push_back(op(OpKind::wait_complete));
  }
}

}  // namespace megamoe::checker
