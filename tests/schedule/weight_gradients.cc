// The weight gradients: as a kernel of its own, and with rows beside them. One agent a CTA loads a
// tile, waits for it, and stores the results, in the order of gradient_walk.cuh; a CTA loads half
// of a tile's rows.
#include <algorithm>

#include "schedule/layer_builder.h"
#include "schedule/row_blocks.h"

namespace megamoe::checker {
namespace {

constexpr std::uint32_t kCluster = schedule::kClusterSize;
constexpr std::uint32_t kGradients = 1;  // inner rows that the gradient of gate_up leaves
constexpr std::uint32_t kDown = 0;       // the early job, which does not read x
constexpr int kBlock = 64;               // rows of a K block, of which each CTA loads half

}  // namespace

std::vector<LayerModel::Builder::GradientTile> LayerModel::Builder::gradient_tiles(
    std::uint32_t num_early) const {
  std::vector<GradientTile> tiles;
  const auto add_jobs = [&](std::uint32_t from, std::uint32_t to) {
    for (std::uint32_t expert = 0; expert < num_experts(); ++expert) {
      for (std::uint32_t job = from; job < to; ++job) tiles.push_back({expert, job});
    }
  };
  add_jobs(0, num_early);
  add_jobs(num_early, kJobs);
  return tiles;
}

std::vector<LayerModel::Builder::GradientTile> LayerModel::Builder::tiles_of(
    std::uint32_t cta, std::span<const GradientTile> tiles) const {
  std::vector<GradientTile> own;
  for (std::size_t i = cta / kCluster; i < tiles.size(); i += shape().num_ctas / kCluster) {
    own.push_back(tiles[i]);
  }
  return own;
}

DatumId LayerModel::Builder::gradient(const GradientTile& tile, std::uint32_t cta) const {
  return own().gradient_eJ + (tile.expert * kJobs + tile.job) * kCluster + cta % kCluster;
}
std::uint64_t LayerModel::Builder::gradient_tag(const GradientTile& tile, std::uint32_t cta) const {
  return tag(Tag::gradient, rank_, tile.expert, tile.job * kCluster + cta % kCluster);
}

/// The CTA's `number`-th tile, from 0.
void LayerModel::Builder::gradient_tile(const GradientTile& tile, std::uint32_t cta,
                                        std::uint32_t number, Program& steps) const {
  const std::uint32_t filled = barrier(cta, kStageFilled);
  const int begin = rows().begin_e[tile.expert];
  const int end =
      begin + schedule::num_row_units(rows().count_e[tile.expert]) * schedule::kRowsPerUnit;
  steps.push_back(op(OpKind::arrive_expecting, filled, 0, 1));
  for (int row = begin + static_cast<int>(cta % kCluster) * kBlock / 2; row < end; row += kBlock) {
    const schedule::RowRange range{row, std::min(kBlock / 2, end - row)};
    for (std::uint32_t h = 0; h < shape().num_h_blocks; ++h) {
      read_rows(tile.job == kDown ? Tag::staged_dy : Tag::staged_x, range, h, steps);
    }
    // wa for down, du for up, dg for gate.
    for (std::uint32_t column = 0; column < shape().num_i_tiles * 2; ++column) {
      read_inner(kGradients, range, column, (kPlanes - tile.job) % kPlanes, steps);
    }
  }
  steps.push_back(
      op(OpKind::load_write, shared(cta, kStageAt), tag(Tag::shared, rank_, number, 0), 0, filled));
  steps.push_back(op(OpKind::await_barrier, filled, 0, number + 1));
  steps.push_back(
      op(OpKind::write, shared(cta, kSlotAt), tag(Tag::shared, rank_, number, 1), 0, 1));
  steps.push_back(op(OpKind::fence_shared));
  steps.push_back(
      op(OpKind::store, shared(cta, kSlotAt), gradient_tag(tile, cta), 0, gradient(tile, cta)));
  steps.push_back(op(OpKind::commit));
  steps.push_back(op(OpKind::wait_read));
}

void LayerModel::Builder::weight_gradients() {
  kernel_.name = "weight_gradients";
  if (control_.call_failed) return;
  const std::vector<GradientTile> tiles = gradient_tiles(0);
  on_all_ctas("multiplies", [&](std::uint32_t cta, Program& steps) {
    std::uint32_t number = 0;
    for (const GradientTile& tile : tiles_of(cta, tiles)) {
      gradient_tile(tile, cta, number++, steps);
    }
    steps.push_back(op(OpKind::wait_complete));
  });
}

/// Before its first tile that reads x a CTA waits for all of it.
void LayerModel::Builder::tiles_beside_rows(std::uint32_t cta, std::span<const GradientTile> tiles,
                                            Program& steps) {
  // None is left where split_groups() leaves none.
  bool awaits_x = call().kept != Kept::nothing && !has(Fault::x_not_awaited);
  std::uint32_t number = 0;
  for (const GradientTile& tile : tiles) {
    if (tile.job != kDown && std::exchange(awaits_x, false)) {
      read_pulls_left(steps);
      steps.push_back(op(OpKind::await_counter, pulls_done(), 0, num_own_pulls()));
      if (!has(Fault::x_awaited_without_fence)) steps.push_back(op(OpKind::fence));
    }
    gradient_tile(tile, cta, number++, steps);
  }
  steps.push_back(op(OpKind::wait_complete));
}

/// Of the gradients beside dx: all of down, which do not read x, and half of the others.
std::uint32_t LayerModel::Builder::num_tiles_beside_dx() const {
  return num_experts() + num_experts() * (kJobs - 1) / 2;
}

/// The kernel of weight_gradients_beside_rows() on the SMs that dx leaves to it. In the model it
/// ends before gradients are announced, so it reduces nothing; what it would reduce, the launch
/// behind dx does.
void LayerModel::Builder::gradients_beside_dx() {
  if (control_.call_failed) return;
  const std::vector<GradientTile> tiles = gradient_tiles(kDown + 1);
  for (std::uint32_t cta = 0; cta < shape().num_ctas; ++cta) {
    const std::uint32_t own_cta = shape().num_ctas + cta;
    const std::span beside = std::span(tiles).first(num_tiles_beside_dx());
    tiles_beside_rows(own_cta, tiles_of(cta, beside), agent(own_cta, "multiplies"));
    if (call().kept != Kept::nothing) pull_role(agent(own_cta, "pulls"));
  }
}

/// weight_gradients_beside_rows_kernel.cuh
void LayerModel::Builder::weight_gradients_beside_rows() {
  kernel_.name = "weight_gradients_beside_rows";
  if (control_.call_failed) return;
  const std::vector<GradientTile> tiles = gradient_tiles(kDown + 1);
  const std::span left =
      std::span(tiles).subspan(shape().gradients_beside_dx ? num_tiles_beside_dx() : 0);
  on_all_ctas("multiplies", [&](std::uint32_t cta, Program& steps) {
    tiles_beside_rows(cta, tiles_of(cta, left), steps);
  });
  on_all_ctas("pulls and reduces", [&](std::uint32_t /*cta*/, Program& steps) {
    Op poll = op(OpKind::poll_later, signal(kGradientsSent, rank_, 0), 0, control_.epoch);
    steps.push_back(poll);
    if (call().kept != Kept::nothing) pull_role(steps);
    poll.kind = OpKind::poll_signals;
    steps.push_back(poll);
    reduce_beside(steps);
  });
}

}  // namespace megamoe::checker
