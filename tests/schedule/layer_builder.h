// Builds the programs of one launch on one rank. Of layer_model.cc, small_kernels.cc,
// product_kernels.cc, plain_products.cc, weight_gradients.cc, pull_agent.cc and reductions.cc.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "schedule/gradient_walk.h"
#include "schedule/layer_model.h"

namespace megamoe::checker {

/// A product over rows grouped by expert.
struct LayerModel::Product {
  const char* name = "";
  std::uint32_t num_channel_tiles = 0;  ///< CTA tiles
  int pieces_per_warpgroup = 1;
  bool pulls = false;
  bool pushes = false;
};

class LayerModel::Builder {
 public:
  Builder(const LayerModel& model, std::uint32_t rank, Place place, const RankControl& control);
  Kernel build();
  /// The next steps of who decides as it goes.
  void go_on(std::uint32_t cta, Does what, Registers& registers, Program& steps) const;
  /// Every output of the rank, and what it must hold.
  [[nodiscard]] std::vector<std::pair<DatumId, std::uint64_t>> results() const;

 private:
  using Launch = LayerModel::Launch;
  using Tag = LayerModel::Tag;

  [[nodiscard]] bool has(Fault fault) const { return model_.shape_.fault == fault; }
  [[nodiscard]] const LayerShape& shape() const { return model_.shape_; }
  [[nodiscard]] const Arrays& own() const { return model_.arrays_[rank_]; }
  [[nodiscard]] const Arrays& of(std::uint32_t rank) const { return model_.arrays_[rank]; }
  [[nodiscard]] const CallSpec& call() const { return model_.calls_[place_.call]; }
  [[nodiscard]] const CallPlan& plan() const { return model_.plans_[place_.call]; }
  [[nodiscard]] const RankPlan& rows() const { return plan().rank[rank_]; }
  [[nodiscard]] bool backward() const { return call().backward; }
  [[nodiscard]] std::uint32_t num_ranks() const {
    return static_cast<std::uint32_t>(shape().dims.num_ranks);
  }
  [[nodiscard]] std::uint32_t top_k() const {
    return static_cast<std::uint32_t>(shape().dims.top_k);
  }
  [[nodiscard]] std::uint32_t num_experts() const {
    return static_cast<std::uint32_t>(shape().dims.experts_per_rank());
  }
  [[nodiscard]] std::uint32_t num_tokens() const { return plan().num_tokens_R[rank_]; }
  [[nodiscard]] std::uint64_t tag(Tag kind, std::uint32_t rank, std::uint32_t b = 0,
                                  std::uint32_t c = 0) const;

  // Places.
  [[nodiscard]] DatumId x(std::uint32_t row, std::uint32_t h) const;
  [[nodiscard]] DatumId dy(std::uint32_t row, std::uint32_t h) const;
  [[nodiscard]] DatumId inner(std::uint32_t unit, std::uint32_t column, std::uint32_t plane) const;
  [[nodiscard]] DatumId slot(const RowOrigin& origin, std::uint32_t h, std::uint32_t piece) const;
  [[nodiscard]] DatumId shared(std::uint32_t cta, std::uint32_t datum) const;
  [[nodiscard]] std::uint32_t barrier(std::uint32_t cta, std::uint32_t of_cta) const;
  [[nodiscard]] std::uint32_t signal(std::uint32_t what, std::uint32_t at,
                                     std::uint32_t from) const;
  [[nodiscard]] std::uint32_t rows_arrived(std::uint32_t block) const;
  [[nodiscard]] std::uint32_t counter(std::uint32_t number) const {
    return own().first_counter + number;
  }
  /// Of the launch's own pulls.
  [[nodiscard]] bool pulls_late() const {
    return place_.launch == Launch::weight_gradients_beside_rows ||
           place_.launch == Launch::gradients_beside_dx;
  }
  [[nodiscard]] std::uint32_t next_pull() const {
    return counter(pulls_late() ? kNextPullOfX : kNextPull);
  }
  [[nodiscard]] std::uint32_t pulls_done() const {
    return counter(pulls_late() ? kPullsOfXDone : kPullsDone);
  }
  [[nodiscard]] std::uint32_t num_passes() const;

  // What lies there.
  [[nodiscard]] std::uint64_t row_tag(Tag kind, std::uint32_t row, std::uint32_t h) const;
  [[nodiscard]] std::uint64_t inner_tag(std::uint32_t stage, std::uint32_t unit,
                                        std::uint32_t column, std::uint32_t plane) const;
  [[nodiscard]] std::uint64_t slot_tag(const RowOrigin& origin, std::uint32_t h,
                                       std::uint32_t piece) const;

  // Small kernels.
  Program& agent(std::uint32_t cta, std::string role);
  void on_all_ctas(const char* role, const std::function<void(std::uint32_t, Program&)>& body);
  void stage();
  void enter();
  void write_lists();
  void meet(std::uint32_t what, const char* name);
  void announce();
  [[nodiscard]] bool is_dropped(std::uint32_t what) const;
  void send_to_all(std::uint32_t what, Program& steps) const;
  void order_pulls();
  void order_on(std::uint32_t cta, Program& steps);
  void split_groups();
  void clear_pads(std::uint32_t cta, Program& steps) const;
  void pull_rows();
  void push_rows();
  void push_dweights();

  // Reductions.
  void reduce();
  void reduce_rest();
  void reduce_part(std::uint32_t token, std::uint32_t h, Program& steps) const;
  [[nodiscard]] std::vector<RowOrigin> filled_slots(std::uint32_t token) const;
  void reduce_dweights(std::uint32_t token, Program& steps) const;
  void reduce_beside(Program& steps) const;
  void continue_rest(std::uint32_t cta, const Registers& registers, Program& steps) const;
  void continue_reduction(std::uint32_t cta, Registers& registers, Program& steps) const;
  void load_part(std::uint32_t cta, std::uint32_t token, std::uint32_t part, Registers& registers,
                 Program& steps) const;
  void add_part(std::uint32_t cta, std::uint32_t token, std::uint32_t part, std::uint32_t number,
                Program& steps) const;

  // Weight gradients.
  using GradientTiles = std::vector<schedule::GradientTile>;
  /// Of numbers `first`, `first` + `step`, ... below `end`, with the `num_early` first jobs of all
  /// experts before the others.
  struct TileNumbers {
    std::uint32_t first = 0;
    std::uint32_t step = 1;
    std::uint32_t end = ~std::uint32_t{0};
  };
  [[nodiscard]] GradientTiles gradient_tiles(std::uint32_t cta, int num_early,
                                             const TileNumbers& numbers) const;
  [[nodiscard]] std::uint32_t num_tiles_beside_dx() const;
  void weight_gradients();
  void weight_gradients_beside_rows(std::uint32_t first_cta, const char* name);
  void tiles_beside_rows(std::uint32_t cta, const GradientTiles& tiles, Program& steps) const;
  void gradient_tile(const schedule::GradientTile& tile, std::uint32_t cta, std::uint32_t number,
                     Program& steps) const;
  [[nodiscard]] std::pair<DatumId, std::uint64_t> gradient(std::uint32_t expert, std::uint32_t job,
                                                           std::uint32_t block) const;

  // Products as rings of roles.
  using Tiles = std::vector<schedule::GroupedTile>;
  void product(const Product& product);
  template <schedule::Shared kShared>
  [[nodiscard]] Tiles tiles_of(std::uint32_t cta, std::uint32_t num_channel_tiles) const;
  [[nodiscard]] Tiles tiles(std::uint32_t cta, std::uint32_t num_channel_tiles) const;
  [[nodiscard]] schedule::RowRange rows_loaded(const schedule::GroupedTile& tile,
                                               std::uint32_t cta) const;
  void load_role(const Product& product, std::uint32_t cta, Program& steps) const;
  void await_rows(const schedule::GroupedTile& tile, std::uint32_t cta, Program& steps) const;
  void look_ahead(const schedule::GroupedTile& next, std::uint32_t cta, std::uint32_t look,
                  Program& steps) const;
  void load_stage(const Product& product, const schedule::GroupedTile& tile, std::uint32_t k_block,
                  std::uint32_t load, std::uint32_t cta, Program& steps) const;
  void math_role(const Product& product, std::uint32_t cta, std::uint32_t warpgroup,
                 Program& steps) const;
  void store_role(const Product& product, std::uint32_t cta, std::uint32_t warp,
                  Program& steps) const;
  void push_role(const Product& product, std::uint32_t cta, std::uint32_t warp,
                 Program& steps) const;
  void push_piece(const schedule::GroupedTile& tile, std::uint32_t cta, std::uint32_t slot_idx,
                  std::uint32_t piece, std::uint32_t warp, Program& steps) const;
  // Products as one agent a CTA.
  void plain_product(const Product& product);
  /// A rank's rows of a tile that product `launch` reads in K block `k_block`.
  void read_operand(schedule::RowRange rows, std::uint32_t k_block, Program& steps) const;
  void read_rows(Tag kind, schedule::RowRange rows, std::uint32_t h, Program& steps) const;
  void read_inner(std::uint32_t stage, schedule::RowRange rows, std::uint32_t column,
                  std::uint32_t plane, Program& steps) const;
  /// What the tile's piece is: where it goes, with which tag.
  void outputs(const schedule::GroupedTile& tile, std::uint32_t warpgroup, std::uint32_t piece,
               std::vector<std::pair<DatumId, std::uint64_t>>& to) const;

  void pull_role(Program& steps) const;
  void read_pulls_left(Program& steps) const;
  /// Pulls of the launch.
  [[nodiscard]] std::uint32_t num_own_pulls() const;
  void continue_pulls(std::uint32_t cta, Registers& registers, Program& steps) const;
  /// Whether a pass of the pulls moves dy.
  [[nodiscard]] bool moves_dy(std::uint32_t pass) const {
    return (pass == 1) != (place_.launch == Launch::gradient_and_pull);
  }
  void chunk_loads(std::uint32_t cta, std::uint32_t pull, Registers& registers,
                   Program& steps) const;
  void store_pending(std::uint32_t cta, Registers& registers, Program& steps) const;
  void count_stored(Registers& registers, Program& steps) const;

  const LayerModel& model_;
  std::uint32_t rank_;
  Place place_;
  RankControl control_;
  Kernel kernel_;
};

// Steps.
inline Op op(OpKind kind, std::uint32_t object = 0, std::uint64_t tag = 0, std::uint32_t amount = 0,
             std::uint32_t other = 0) {
  return {kind, object, other, amount, tag};
}
inline Op ask_again(Does what) {
  return op(OpKind::expand, 0, 0, static_cast<std::uint32_t>(what));
}

}  // namespace megamoe::checker
