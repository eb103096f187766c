// The weight gradients: as a kernel of its own, and with rows beside them. One agent a CTA loads a
// tile, waits for it, and stores the results, in the order of the kernels' walk; a CTA loads half
// of a tile's rows.
#include <algorithm>
#include <limits>
#include <numeric>

#include "schedule/layer_builder.h"
#include "schedule/row_blocks.h"

namespace megamoe::checker {
namespace {

using schedule::GradientTile;
using schedule::Shared;

constexpr std::uint32_t kCluster = schedule::kClusterSize;
constexpr std::uint32_t kGradients = 1;  // inner rows that the gradient of gate_up leaves
constexpr int kDown = 0;                 // the early job, which does not read x
constexpr int kHalfBlock = schedule::kRowsPerKBlock / 2;

/// As GradientWalk wants them: every expert has tiles, as where gradients are stored.
struct Job {
  int num_channel_tiles;
  int num_line_blocks;
};
struct Walked {
  std::vector<Job> jobs;
  int num_jobs;
  int num_early_jobs;
  schedule::GroupedRowsArgs rows;
};
struct Experts {
  int num_groups;
  std::vector<int> groups;
};

/// Tiles dealt by number, in place of a counter.
class Dealt {
 public:
  Dealt(std::uint32_t first, std::uint32_t step, std::uint32_t end)
      : next_(first), step_(step), end_(end) {}
  [[nodiscard]] std::uint32_t read() const {
    return next_ < end_ ? next_ : std::uint32_t{std::numeric_limits<std::int32_t>::max()};
  }
  void hand_back() { next_ += step_; }

 private:
  std::uint32_t next_;
  std::uint32_t step_;
  std::uint32_t end_;
};

/// Lines fastest as bf16, channels where gradients are added, which is what runs beside dx.
template <Shared kShared, bool kLinesFirst>
std::vector<GradientTile> walk(const Walked& walked, const Experts& experts, std::uint32_t cta,
                               Dealt dealt) {
  schedule::GradientWalk<kShared, kLinesFirst, Walked, Experts, Dealt> walk(
      walked, experts, static_cast<int>(cta % kCluster), dealt);
  std::vector<GradientTile> tiles;
  GradientTile tile{};
  while (walk.next(tile)) tiles.push_back(tile);
  return tiles;
}

}  // namespace

LayerModel::Builder::GradientTiles LayerModel::Builder::gradient_tiles(
    std::uint32_t cta, int num_early, const TileNumbers& numbers) const {
  const Walked walked{
      std::vector<Job>(kJobs, Job{kJobChannelTiles, kJobLineBlocks}),
      kJobs,
      num_early,
      {rows().begin_e.data(), rows().count_e.data(), static_cast<std::int32_t>(num_experts())}};
  Experts experts{static_cast<int>(num_experts()), std::vector<int>(num_experts())};
  std::iota(experts.groups.begin(), experts.groups.end(), 0);
  const Dealt dealt(numbers.first, numbers.step, numbers.end);
  const bool channels_first = shape().gradients_beside_dx;
  if (shape().shared == Shared::rows) {
    return channels_first ? walk<Shared::rows, false>(walked, experts, cta, dealt)
                          : walk<Shared::rows, true>(walked, experts, cta, dealt);
  }
  return channels_first ? walk<Shared::channels, false>(walked, experts, cta, dealt)
                        : walk<Shared::channels, true>(walked, experts, cta, dealt);
}

/// A block of a job, and what it must hold.
std::pair<DatumId, std::uint64_t> LayerModel::Builder::gradient(std::uint32_t expert,
                                                                std::uint32_t job,
                                                                std::uint32_t block) const {
  const std::uint32_t of_expert = job * kJobBlocks + block;
  return {own().gradient_eJcb + expert * kJobs * kJobBlocks + of_expert,
          tag(Tag::gradient, rank_, expert, of_expert)};
}

/// The CTA's `number`-th tile, from 0.
void LayerModel::Builder::gradient_tile(const GradientTile& tile, std::uint32_t cta,
                                        std::uint32_t number, Program& steps) const {
  const std::uint32_t filled = barrier(cta, kStageFilled);
  const auto job = static_cast<std::uint32_t>(tile.job);
  steps.push_back(op(OpKind::arrive_expecting, filled, 0, 1));
  for (int block = 0; block < tile.num_k_blocks; ++block) {
    const int half = static_cast<int>(cta % kCluster) * kHalfBlock;
    const int num_rows = block == tile.num_k_blocks - 1 ? tile.last_k_steps * schedule::kRowsPerUnit
                                                        : schedule::kRowsPerKBlock;
    const schedule::RowRange range{tile.first_row + block * schedule::kRowsPerKBlock + half,
                                   std::clamp(num_rows - half, 0, kHalfBlock)};
    for (std::uint32_t h = 0; h < shape().num_h_blocks; ++h) {
      read_rows(tile.job == kDown ? Tag::staged_dy : Tag::staged_x, range, h, steps);
    }
    // wa for down, du for up, dg for gate.
    for (std::uint32_t column = 0; column < shape().num_i_tiles * 2; ++column) {
      read_inner(kGradients, range, column, (kPlanes - job) % kPlanes, steps);
    }
  }
  steps.push_back(
      op(OpKind::load_write, shared(cta, kStageAt), tag(Tag::shared, rank_, number, 0), 0, filled));
  steps.push_back(op(OpKind::await_barrier, filled, 0, number + 1));
  steps.push_back(
      op(OpKind::write, shared(cta, kSlotAt), tag(Tag::shared, rank_, number, 1), 0, 1));
  steps.push_back(op(OpKind::fence_shared));
  for (int i = 0; i < tile.num_blocks; ++i) {
    const auto block = static_cast<std::uint32_t>(tile.first_block + i);
    const auto [datum, datum_tag] =
        gradient(static_cast<std::uint32_t>(tile.group), job,
                 static_cast<std::uint32_t>(tile.channel_tile) * kJobLineBlocks + block);
    steps.push_back(op(OpKind::store, shared(cta, kSlotAt), datum_tag, 0, datum));
  }
  steps.push_back(op(OpKind::commit));
  steps.push_back(op(OpKind::wait_read));
}

void LayerModel::Builder::weight_gradients() {
  kernel_.name = "weight_gradients";
  if (control_.call_failed) return;
  on_all_ctas("multiplies", [&](std::uint32_t cta, Program& steps) {
    std::uint32_t number = 0;
    for (const GradientTile& tile :
         gradient_tiles(cta, 0, {cta / kCluster, shape().num_ctas / kCluster})) {
      gradient_tile(tile, cta, number++, steps);
    }
    steps.push_back(op(OpKind::wait_complete));
  });
}

/// Before its first tile that reads x a CTA waits for all of it.
void LayerModel::Builder::tiles_beside_rows(std::uint32_t cta, const GradientTiles& tiles,
                                            Program& steps) const {
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
  if (!shape().gradients_beside_dx) return 0;
  const GradientTiles all = gradient_tiles(0, kDown + 1, {});
  const auto num_down = static_cast<std::uint32_t>(
      std::count_if(all.begin(), all.end(), [](const auto& tile) { return tile.job == kDown; }));
  return num_down + (static_cast<std::uint32_t>(all.size()) - num_down) / 2;
}

/// weight_gradients_beside_rows_kernel.cuh: behind dx, on the CTAs from 0 on, and beside it, on
/// those from num_ctas on. The kernels take tiles from one counter; here they share them.
void LayerModel::Builder::weight_gradients_beside_rows(std::uint32_t first_cta, const char* name) {
  kernel_.name = name;
  if (control_.call_failed) return;
  const std::uint32_t num_beside = num_tiles_beside_dx();
  for (std::uint32_t i = 0; i < shape().num_ctas; ++i) {
    TileNumbers numbers{i / kCluster, shape().num_ctas / kCluster, num_beside};
    if (first_cta == 0) {
      numbers.first += num_beside;
      numbers.end = TileNumbers{}.end;
    }
    const std::uint32_t cta = first_cta + i;
    tiles_beside_rows(cta, gradient_tiles(cta, kDown + 1, numbers), agent(cta, "multiplies"));
  }
  for (std::uint32_t i = 0; i < std::min(shape().num_ctas, shape().num_movers); ++i) {
    Program& steps = agent(first_cta + i, "pulls and reduces");
    Op poll = op(OpKind::poll_later, signal(kGradientsSent, rank_, 0), 0, control_.epoch);
    steps.push_back(poll);
    if (call().kept != Kept::nothing) pull_role(steps);
    poll.kind = OpKind::poll_signals;
    steps.push_back(poll);
    reduce_beside(steps);
  }
}

}  // namespace megamoe::checker
