// The kernels of a layer's calls as programs of agents, with the order of their launches.
//
// What they share with the real kernels: the plan (routing/plan.h), the order of pulls, blocks and
// counters, tiles and their walk (schedule/), and how output pieces pass through slots
// (kernels/products/pieces.h). What they repeat: the launches of a call and the steps of each role,
// named as in the kernels, so that the two can be read side by side.
//
// Legend: R ranks, T tokens of a rank, K slots, C rows of a rank with pads, h blocks of the hidden
// dimension (channel tiles of down), i channel tiles of gate_up, each two blocks of inner columns,
// e experts, J jobs of the weight gradients with c channel tiles and b line blocks.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "schedule/call_plan.h"
#include "schedule/machine.h"
#include "schedule/tile_walk.h"

namespace megamoe::checker {

/// Mistakes that a test seeds, each of which must be found.
enum class Fault {
  none,
  // A missing fence.
  pull_without_reader_fence,
  load_without_reader_fence,
  stage_without_writer_fence,
  pads_without_writer_fence,
  epilogue_without_fence,
  // The wrong wait.
  counted_after_read_wait,
  counted_a_group_early,
  last_row_counted_a_group_early,
  chunk_reused_without_wait,
  stage_released_a_step_early,
  slot_granted_before_read,
  left_with_stores_in_flight,
  awaits_first_block_only,
  // A flag that is dropped, early, or twice.
  row_not_counted,
  row_counted_before_wait,
  row_counted_twice,
  all_done_before_wait,
  entered_signal_dropped,
  entered_signal_early,
  staged_signal_dropped,
  results_signal_dropped,
  // Two orders swapped.
  fence_before_stores,
  staged_signal_before_lists,
  results_signal_before_push,
  pulls_ordered_before_meeting,
  // Between calls.
  epoch_reused,
  counters_not_started_again,
  pulls_not_started_again,
  restaged_before_results,
  headers_not_doubled,
  failed_rank_tells,
  // Who may wait for whom, and how a wait for one that has left ends.
  pulls_bound_to_ctas,
  word_of_leaving_without_last_look,
  word_of_leaving_too_early,
  // Rows beside the weight gradients: what dx is summed from (whose announcement is no condition of
  // anything: dropping it is no mistake),
  announcement_dropped,
  announced_before_push,
  announced_before_dweights,
  announced_by_a_push_warp,
  reduce_without_reader_fence,
  reduce_buffer_without_wait,
  reduce_buffer_without_fence,
  reduce_buffer_refilled_early,
  // which tokens are left,
  rest_forgotten,
  rest_from_zero,
  rest_before_weight_gradients,
  rest_beside_weight_gradients,
  rest_before_meeting,
  reduced_not_started_again,
  // and x.
  x_not_awaited,
  x_awaited_without_fence,
  x_pulls_not_started_again,
  results_signal_before_weight_gradients,
  // What leaves waits for weight gradients: behind dx, or beside it.
  announced_behind_gradients,
  dweights_behind_gradients,
  joined_before_announcement,
  push_awaits_gradients,
};

struct LayerShape {
  RoutingDims dims;
  std::uint32_t num_ctas = 2;       ///< of a kernel; even
  std::uint32_t resident_ctas = 2;  ///< that fit the SMs
  std::uint32_t num_h_blocks = 1;
  std::uint32_t num_chunks = 1;  ///< of a row, as it is pulled; divides num_h_blocks
  std::uint32_t num_i_tiles = 1;
  std::uint32_t num_k_blocks = 2;  ///< of every product; at least num_h_blocks and 2 num_i_tiles
  schedule::Shared shared = schedule::Shared::channels;
  bool overlap = true;
  bool gradients_beside_dx = false;  ///< the first of them, in CTAs of their own
  /// CTAs of a kernel of weight gradients that pull and reduce; the warps of the others never come
  /// to it.
  std::uint32_t num_movers = ~std::uint32_t{0};
  bool deadlines_may_expire = false;
  Fault fault = Fault::none;
};

class LayerModel : public KernelSource {
 public:
  LayerModel(const LayerShape& shape, std::vector<CallSpec> calls);

  std::shared_ptr<const Kernel> kernel(std::uint32_t rank, std::uint32_t index,
                                       const RankControl& control) const override;
  void expand(std::uint32_t rank, std::uint32_t index, std::uint32_t cta, Does what,
              Registers& registers, Program& steps) const override;

  /// A machine before the first call.
  static Machine start(const std::shared_ptr<const LayerModel>& model);
  /// Throws Violation unless the last call that may succeed has written every output.
  void check_outputs(const Machine& machine) const;

 private:
  enum class Launch {
    stage_and_enter,
    write_lists,
    meet_staged,
    order_pulls,
    split_groups,
    gate_up_and_pull,
    down_and_push,
    meet_results,
    reduce,
    gradient,
    gradient_and_pull,
    dx_and_push,
    fork_gradients,
    gradients_beside_dx,  ///< stands where the streams join
    push_dweights,
    announce,
    weight_gradients_beside_rows,
    reduce_rest,
    weight_gradients,
    pull_rows,
    gate_up,
    down,
    dx,
    push_rows,
  };
  enum class Tag : std::uint64_t {
    staged_x = 1,
    staged_dy,
    staged_weight,
    lists,
    begins,
    header,
    counts,
    plan,
    order,
    origin,
    progress,
    pad_x,
    pad_dy,
    inner,
    slot,
    slot_dweight,
    output,
    output_dweight,
    gradient,
    shared,
    o_row,
    dx_row,
  };
  /// The arrays of one rank.
  struct Arrays {
    DatumId staged_x_Th, staged_dy_Th, staged_weight_T;
    DatumId lists_R, begins, headers_2R, counts_2R;
    DatumId plan_of_call, order_P, origin_C;
    DatumId progress;  ///< number of pulls: of the product, and of those left to gradients
    DatumId x_Ch, dy_Ch, pad_x, pad_dy;  ///< pads: one for each unit of rows
    DatumId inner;                       ///< [units][columns][planes]
    DatumId slots_TKhb, slot_dweights_TK;
    DatumId output_Th, output_dweights_T;
    DatumId gradient_eJcb;  ///< blocks of a job
    DatumId shared;         ///< [CTAs][kSharedData]
    std::uint32_t first_counter;
  };
  /// Of the launch that has most.
  [[nodiscard]] std::uint32_t ctas_per_rank() const {
    return shape_.gradients_beside_dx ? 2 * shape_.num_ctas : shape_.num_ctas;
  }
  /// Shared memory of a CTA, and its barriers.
  static constexpr std::uint32_t kStageParts = 4;
  static constexpr std::uint32_t kChunkAt = 0;
  static constexpr std::uint32_t kStageAt = 2;
  static constexpr std::uint32_t kSlotAt = kStageAt + 3 * kStageParts;
  static constexpr std::uint32_t kSharedData = kSlotAt + 2;
  static constexpr std::uint32_t kStageFilled = 0;
  static constexpr std::uint32_t kChunkArrived = 3;
  static constexpr std::uint32_t kSlotsArrived = 5;
  static constexpr std::uint32_t kStageFree = 7;  ///< loads complete on those before
  static constexpr std::uint32_t kSlotFilled = 10;
  static constexpr std::uint32_t kSlotGranted = 12;  ///< [warpgroup][slot]
  static constexpr std::uint32_t kBarriers = 16;
  // Signals: device::Signal.
  static constexpr std::uint32_t kEntered = 0;
  static constexpr std::uint32_t kRowsStaged = 1;
  static constexpr std::uint32_t kGradientsSent = 2;
  static constexpr std::uint32_t kResultsSent = 3;
  static constexpr std::uint32_t kPlanes = 3;  ///< of inner rows: a or wa; g or dg; u or du
  static constexpr std::uint32_t kPieces = 4;  ///< of an h block
  static constexpr std::uint32_t kJobs = 3;    ///< of the weight gradients: down, up, gate
  static constexpr std::uint32_t kJobChannelTiles = 2;
  static constexpr std::uint32_t kJobLineBlocks = 2;
  static constexpr std::uint32_t kJobBlocks = kJobChannelTiles * kJobLineBlocks;
  /// Of a rank's counters, by number: rows that have arrived come behind them.
  static constexpr std::uint32_t kNextPull = 0;
  static constexpr std::uint32_t kPullsDone = 1;
  static constexpr std::uint32_t kNextPullOfX = 2;  ///< by the weight gradients
  static constexpr std::uint32_t kPullsOfXDone = 3;
  static constexpr std::uint32_t kNumReduced = 4;
  static constexpr std::uint32_t kRowsArrived = 5;
  static constexpr std::uint32_t kPullsTaken = 1;  ///< in a tag: none are left to the gradients

  /// One launch: everything that builds its agents' programs.
  class Builder;
  struct Product;
  friend class Builder;

  struct Place {
    std::uint32_t call = 0;
    Launch launch = Launch::stage_and_enter;
  };
  [[nodiscard]] std::optional<Place> place_of(std::uint32_t index) const;
  [[nodiscard]] std::vector<Launch> launches_of(const CallSpec& call) const;
  /// Behind p, with overlap.
  void add_gradients_beside_rows(std::vector<Launch>& launches) const;
  void swap_launches(std::vector<Launch>& launches) const;
  /// For kernel `index`: the kernel that it forks, and those that its rows must not wait for.
  void relate(std::uint32_t index, const Place& place, bool call_failed, Kernel& kernel) const;
  void measure();
  void add_arrays();

  LayerShape shape_;
  std::vector<CallSpec> calls_;
  std::vector<CallPlan> plans_;  ///< of each call
  std::vector<std::vector<Launch>> launches_;
  std::uint32_t max_tokens_ = 0;
  std::uint32_t max_rows_ = 0;
  std::uint32_t max_pulls_ = 0;
  std::vector<Arrays> arrays_;
  Hardware hardware_;
};

}  // namespace megamoe::checker
