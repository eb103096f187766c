// The products whose roles pass stages and slots to each other: load_role.cuh with
// arrived_rows.cuh, math_role.cuh and epilogue.cuh, store_role.cuh, push_role.cuh.
#include "kernels/products/pieces.h"
#include "schedule/layer_builder.h"

namespace megamoe::checker {
namespace {

using schedule::GroupedTile;
using schedule::RowRange;
using schedule::Shared;

constexpr std::uint32_t kNumStages = products::kNumStages;
constexpr std::uint32_t kCluster = schedule::kClusterSize;
constexpr std::uint32_t kWarpgroups = products::kNumMathWarpgroups;
constexpr std::uint32_t kNumPushWarps = 3;
constexpr std::uint32_t kLooks = 3;
constexpr int kBlocksALook = 4;

template <int kPieces>
using Numbering = products::PieceNumbering<kPieces>;

/// PieceNumbering for a number of pieces known when the model runs.
struct Pieces {
  int a_warpgroup;
  [[nodiscard]] std::uint32_t per_tile() const {
    return static_cast<std::uint32_t>(a_warpgroup) * kWarpgroups;
  }
  template <class Function>
  [[nodiscard]] int call(const Function& function) const {
    switch (a_warpgroup) {
      case 1:
        return function(Numbering<1>{});
      case 2:
        return function(Numbering<2>{});
      default:
        return function(Numbering<3>{});
    }
  }
  [[nodiscard]] std::uint32_t warpgroup_of(std::uint32_t n) const {
    return static_cast<std::uint32_t>(
        call([&](auto p) { return p.warpgroup_of(static_cast<int>(n)); }));
  }
  [[nodiscard]] std::uint32_t piece_of(std::uint32_t n) const {
    return static_cast<std::uint32_t>(
        call([&](auto p) { return p.piece_of(static_cast<int>(n)); }));
  }
  [[nodiscard]] std::uint32_t next_warpgroup_of(std::uint32_t n) const {
    return static_cast<std::uint32_t>(
        call([&](auto p) { return p.next_warpgroup_of(static_cast<int>(n)); }));
  }
  [[nodiscard]] std::uint32_t number_of(std::uint32_t warpgroup, std::uint32_t piece) const {
    return static_cast<std::uint32_t>(call(
        [&](auto p) { return p.number_of(static_cast<int>(warpgroup), static_cast<int>(piece)); }));
  }
};
constexpr std::uint32_t kNumSlots = Numbering<1>::kNumSlots;

struct HostGrid {
  int cluster_idx = 0;
  int count = 1;
  [[nodiscard]] int cluster() const { return cluster_idx; }
  [[nodiscard]] int num_clusters() const { return count; }
};

}  // namespace

DatumId LayerModel::Builder::shared(std::uint32_t cta, std::uint32_t datum) const {
  return own().shared + cta * kSharedData + datum;
}
std::uint32_t LayerModel::Builder::barrier(std::uint32_t cta, std::uint32_t of_cta) const {
  return (rank_ * model_.ctas_per_rank() + cta) * kBarriers + of_cta;
}

template <Shared kShared>
LayerModel::Builder::Tiles LayerModel::Builder::tiles_of(std::uint32_t cta,
                                                         std::uint32_t num_channel_tiles) const {
  const RankPlan& rank = rows();
  const auto num_channels = static_cast<int>(num_channel_tiles);
  std::vector<std::int32_t> first_tile = {0};
  for (const std::int32_t count : rank.count_e) {
    first_tile.push_back(first_tile.back() +
                         schedule::num_cluster_tiles<kShared>(count, num_channels));
  }
  const schedule::GroupedRowsArgs args{rank.begin_e.data(), rank.count_e.data(),
                                       static_cast<std::int32_t>(rank.count_e.size())};
  const schedule::EveryNth every_nth(
      HostGrid{static_cast<int>(cta / kCluster), static_cast<int>(shape().num_ctas / kCluster)});
  schedule::GroupedWalk<kShared, schedule::EveryNth<HostGrid>> walk(
      args, num_channels, first_tile.data(), static_cast<int>(cta % kCluster), every_nth);
  Tiles tiles;
  GroupedTile tile{};
  while (walk.next(tile)) tiles.push_back(tile);
  return tiles;
}

LayerModel::Builder::Tiles LayerModel::Builder::tiles(std::uint32_t cta,
                                                      std::uint32_t num_channel_tiles) const {
  if (control_.call_failed) return {};
  return shape().shared == Shared::rows ? tiles_of<Shared::rows>(cta, num_channel_tiles)
                                        : tiles_of<Shared::channels>(cta, num_channel_tiles);
}

RowRange LayerModel::Builder::rows_loaded(const GroupedTile& tile, std::uint32_t cta) const {
  const auto cta_rank = static_cast<int>(cta % kCluster);
  return shape().shared == Shared::rows ? schedule::rows_of_cta<Shared::rows>(tile, cta_rank)
                                        : schedule::rows_of_cta<Shared::channels>(tile, cta_rank);
}

void LayerModel::Builder::product(const Product& product) {
  kernel_.name = product.name;
  if (control_.call_failed) return;
  kernel_.arrivals.assign(kBarriers, 1);
  for (std::uint32_t i = 0; i < kNumStages; ++i) {
    kernel_.arrivals[kStageFree + i] = kCluster * kWarpgroups;
  }
  for (std::uint32_t i = 0; i < kWarpgroups * kNumSlots; ++i) {
    kernel_.arrivals[kSlotGranted + i] = product.pushes ? kNumPushWarps : 1;
  }
  for (std::uint32_t cta = 0; cta < shape().num_ctas; ++cta) {
    load_role(product, cta, agent(cta, "loads"));
    if (product.pulls) pull_role(agent(cta, "pulls"));
    for (std::uint32_t warpgroup = 0; warpgroup < kWarpgroups; ++warpgroup) {
      math_role(product, cta, warpgroup, agent(cta, "math " + std::to_string(warpgroup)));
    }
    if (product.pushes) {
      for (std::uint32_t warp = 0; warp < kNumPushWarps; ++warp) {
        Program& steps = agent(cta, "pushes " + std::to_string(warp));
        push_role(product, cta, warp, steps);
        if (has(Fault::announced_by_a_push_warp) && backward() && cta + warp == 0) {
          send_to_all(kGradientsSent, steps);
        }
      }
    } else {
      for (std::uint32_t warp = 0; warp < products::kNumStoreWarps; ++warp) {
        store_role(product, cta, warp, agent(cta, "stores " + std::to_string(warp)));
      }
    }
  }
}

/// ArrivedRows::await
void LayerModel::Builder::await_rows(const GroupedTile& tile, std::uint32_t cta,
                                     Program& steps) const {
  const RowRange range = rows_loaded(tile, cta);
  const schedule::BlockRange blocks = schedule::blocks_of_rows(range.first, range.count);
  for (int i = 0; i < blocks.count; ++i) {
    if (i > 0 && has(Fault::awaits_first_block_only)) break;
    steps.push_back(op(OpKind::await_counter,
                       rows_arrived(static_cast<std::uint32_t>(blocks.first + i)), 0,
                       schedule::kRowsPerBlock, static_cast<std::uint32_t>(i)));
  }
  if (!has(Fault::load_without_reader_fence)) steps.push_back(op(OpKind::fence_looks));
}

/// ArrivedRows::look_ahead
void LayerModel::Builder::look_ahead(const GroupedTile& next, std::uint32_t cta, std::uint32_t look,
                                     Program& steps) const {
  if (look == kLooks - 1) {
    steps.push_back(
        op(OpKind::look_at_all, pulls_done(), 0, static_cast<std::uint32_t>(rows().pulls.size())));
    return;
  }
  const RowRange range = rows_loaded(next, cta);
  const schedule::BlockRange blocks = schedule::blocks_of_rows(range.first, range.count);
  const int first =
      blocks.first / kBlocksALook * kBlocksALook + static_cast<int>(look) * kBlocksALook;
  for (int block = first; block < first + kBlocksALook; ++block) {
    if (block < blocks.first || block >= blocks.first + blocks.count) continue;
    steps.push_back(op(OpKind::look, rows_arrived(static_cast<std::uint32_t>(block)), 0,
                       schedule::kRowsPerBlock, static_cast<std::uint32_t>(block - blocks.first)));
  }
}

void LayerModel::Builder::load_role(const Product& product, std::uint32_t cta,
                                    Program& steps) const {
  const Tiles tiles = this->tiles(cta, product.num_channel_tiles);
  std::uint32_t load = 0;
  for (std::size_t i = 0; i < tiles.size(); ++i) {
    if (product.pulls) await_rows(tiles[i], cta, steps);
    for (std::uint32_t k_block = 0; k_block < shape().num_k_blocks; ++k_block) {
      load_stage(product, tiles[i], k_block, load++, cta, steps);
      if (product.pulls && i + 1 < tiles.size() && k_block < kLooks) {
        look_ahead(tiles[i + 1], cta, k_block, steps);
      }
    }
  }
}

/// load_stage: parts 0 and 1 of a stage are the channels' halves, 2 and 3 the rows'.
void LayerModel::Builder::load_stage(const Product& /*product*/, const GroupedTile& tile,
                                     std::uint32_t k_block, std::uint32_t load, std::uint32_t cta,
                                     Program& steps) const {
  const std::uint32_t stage = load % kNumStages;
  const std::uint32_t cta_rank = cta % kCluster;
  const std::uint32_t first_cta = cta - cta_rank;
  const bool shares_rows = shape().shared == Shared::rows;
  const std::uint32_t filled = barrier(cta, kStageFilled + stage);
  const auto part = [&](std::uint32_t of_cta, std::uint32_t number) {
    return shared(of_cta, kStageAt + stage * kStageParts + number);
  };
  const auto write_tag = [&](std::uint32_t number) {
    return tag(Tag::shared, rank_, load, number);
  };
  const bool has_rows = tile.num_units > 0;
  steps.push_back(
      op(OpKind::await_barrier, barrier(cta, kStageFree + stage), 0, load / kNumStages));
  steps.push_back(op(OpKind::arrive_expecting, filled, 0, shares_rows || has_rows ? 3 : 2));
  if (shares_rows) {
    steps.push_back(op(OpKind::load_write, part(cta, 0), write_tag(0), 0, filled));
    for (std::uint32_t to = first_cta; to < first_cta + kCluster; ++to) {
      read_operand(rows_loaded(tile, cta), k_block, steps);
      steps.push_back(op(OpKind::load_write, part(to, 2 + cta_rank), write_tag(2 + cta_rank), 0,
                         barrier(to, kStageFilled + stage)));
    }
    return;
  }
  for (std::uint32_t to = first_cta; to < first_cta + kCluster; ++to) {
    steps.push_back(op(OpKind::load_write, part(to, cta_rank), write_tag(cta_rank), 0,
                       barrier(to, kStageFilled + stage)));
  }
  if (!has_rows) return;
  read_operand(rows_loaded(tile, cta), k_block, steps);
  steps.push_back(op(OpKind::load_write, part(cta, 2), write_tag(2), 0, filled));
}

/// multiply_tile or skip_tile, and what PieceWriter leaves in the slots.
void LayerModel::Builder::math_role(const Product& product, std::uint32_t cta,
                                    std::uint32_t warpgroup, Program& steps) const {
  const Pieces pieces{product.pieces_per_warpgroup};
  const std::uint32_t first_cta = cta - cta % kCluster;
  const bool shares_rows = shape().shared == Shared::rows;
  const auto release = [&](std::uint32_t stage) {
    for (std::uint32_t to = first_cta; to < first_cta + kCluster; ++to) {
      steps.push_back(op(OpKind::arrive, barrier(to, kStageFree + stage)));
    }
  };
  std::uint32_t load = 0;
  std::uint32_t granted[kNumSlots] = {};
  for (const GroupedTile& tile : tiles(cta, product.num_channel_tiles)) {
    const bool skips = tile.num_units == 0;
    std::uint32_t previous = 0;
    for (std::uint32_t k_block = 0; k_block < shape().num_k_blocks; ++k_block, ++load) {
      const std::uint32_t stage = load % kNumStages;
      steps.push_back(
          op(OpKind::await_barrier, barrier(cta, kStageFilled + stage), 0, load / kNumStages + 1));
      if (skips) {
        release(stage);
        continue;
      }
      for (std::uint32_t part = 0; part < kStageParts; ++part) {
        if (part == (shares_rows ? 1U : 3U)) continue;
        steps.push_back(op(OpKind::group_read, shared(cta, kStageAt + stage * kStageParts + part)));
      }
      steps.push_back(op(OpKind::commit));
      steps.push_back(op(OpKind::wait_read, 0, 0, 1));
      if (has(Fault::stage_released_a_step_early)) {
        release(stage);
      } else if (k_block > 0) {
        release(previous);
      }
      previous = stage;
    }
    if (skips) continue;
    steps.push_back(op(OpKind::wait_read));
    if (!has(Fault::stage_released_a_step_early)) release(previous);
    for (int piece = 0; piece < product.pieces_per_warpgroup; ++piece) {
      const std::uint32_t number = pieces.number_of(warpgroup, static_cast<std::uint32_t>(piece));
      const std::uint32_t slot_idx = number % kNumSlots;
      const std::uint32_t is_first = pieces.warpgroup_of(slot_idx) == warpgroup ? 1 : 0;
      steps.push_back(op(OpKind::await_barrier,
                         barrier(cta, kSlotGranted + warpgroup * kNumSlots + slot_idx), 0,
                         ++granted[slot_idx] - is_first));
      steps.push_back(op(OpKind::write, shared(cta, kSlotAt + slot_idx),
                         tag(Tag::shared, rank_, load, number), 0, 1));
      if (!has(Fault::epilogue_without_fence)) steps.push_back(op(OpKind::fence_shared));
      steps.push_back(op(OpKind::arrive, barrier(cta, kSlotFilled + slot_idx)));
    }
  }
}

/// SlotStores
void LayerModel::Builder::store_role(const Product& product, std::uint32_t cta, std::uint32_t warp,
                                     Program& steps) const {
  const Pieces pieces{product.pieces_per_warpgroup};
  std::uint32_t filled[kNumSlots] = {};
  for (const GroupedTile& tile : tiles(cta, product.num_channel_tiles)) {
    if (tile.num_units == 0) continue;
    for (std::uint32_t number = warp; number < pieces.per_tile();
         number += products::kNumStoreWarps) {
      const std::uint32_t slot_idx = number % kNumSlots;
      const std::uint32_t granted =
          barrier(cta, kSlotGranted + pieces.next_warpgroup_of(number) * kNumSlots + slot_idx);
      steps.push_back(
          op(OpKind::await_barrier, barrier(cta, kSlotFilled + slot_idx), 0, ++filled[slot_idx]));
      std::vector<std::pair<DatumId, std::uint64_t>> to;
      outputs(tile, pieces.warpgroup_of(number), pieces.piece_of(number), to);
      for (const auto& [datum, datum_tag] : to) {
        steps.push_back(op(OpKind::store, shared(cta, kSlotAt + slot_idx), datum_tag, 0, datum));
      }
      steps.push_back(op(OpKind::commit));
      if (!has(Fault::slot_granted_before_read)) steps.push_back(op(OpKind::wait_read));
      steps.push_back(op(OpKind::arrive, granted));
    }
  }
  if (!has(Fault::left_with_stores_in_flight)) steps.push_back(op(OpKind::wait_complete));
}

/// push_role
void LayerModel::Builder::push_role(const Product& product, std::uint32_t cta, std::uint32_t warp,
                                    Program& steps) const {
  const Pieces pieces{product.pieces_per_warpgroup};
  std::uint32_t filled[kNumSlots] = {};
  if (has(Fault::push_awaits_gradients) && backward() && shape().gradients_beside_dx) {
    steps.push_back(op(OpKind::await_counter, counter(kPullsOfXDone), 0,
                       static_cast<std::uint32_t>(rows().pulls.size())));
  }
  for (const GroupedTile& tile : tiles(cta, product.num_channel_tiles)) {
    if (tile.num_units == 0) continue;
    for (std::uint32_t number = 0; number < pieces.per_tile(); ++number) {
      const std::uint32_t slot_idx = number % kNumSlots;
      const std::uint32_t granted =
          barrier(cta, kSlotGranted + pieces.next_warpgroup_of(number) * kNumSlots + slot_idx);
      steps.push_back(
          op(OpKind::await_barrier, barrier(cta, kSlotFilled + slot_idx), 0, ++filled[slot_idx]));
      if (has(Fault::slot_granted_before_read)) steps.push_back(op(OpKind::arrive, granted));
      push_piece(tile, cta, slot_idx, number, warp, steps);
      if (!has(Fault::slot_granted_before_read)) steps.push_back(op(OpKind::arrive, granted));
    }
  }
}

void LayerModel::Builder::push_piece(const GroupedTile& tile, std::uint32_t cta,
                                     std::uint32_t slot_idx, std::uint32_t piece,
                                     std::uint32_t warp, Program& steps) const {
  const auto h = static_cast<std::uint32_t>(tile.channel_tile);
  if (h >= shape().num_h_blocks) return;
  for (auto unit = static_cast<int>(warp); unit < tile.num_units; unit += kNumPushWarps) {
    steps.push_back(op(OpKind::read, shared(cta, kSlotAt + slot_idx), kAnyTag));
    for (int i = unit * schedule::kRowsPerUnit; i < (unit + 1) * schedule::kRowsPerUnit; ++i) {
      if (i >= tile.num_rows) break;
      const auto row = static_cast<std::uint32_t>(tile.first_row + i);
      const RowOrigin& origin = rows().origin_C[row];
      if (piece == 0) {
        steps.push_back(op(OpKind::read, own().origin_C + row, tag(Tag::origin, rank_, row)));
      }
      steps.push_back(op(OpKind::write, slot(origin, h, piece), slot_tag(origin, h, piece)));
    }
  }
}

}  // namespace megamoe::checker
