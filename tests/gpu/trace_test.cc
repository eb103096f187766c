// What kernels of a build with MEGAMOE_TRACE record; skipped in other builds, and without a GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "bench/routing.h"
#include "megamoe/cuda.h"
#include "schedule/beside_dx.h"
#include "trace/record.h"
#include "trace/summary.h"

namespace megamoe::timeline {
namespace {

constexpr int kNumRanks = 2;
constexpr int kNumSms = 32;  // two ranks may share the device

class Trace : public testing::Test {
 protected:
  void SetUp() override {
    if (!can_record()) GTEST_SKIP() << "this build records nothing (MEGAMOE_TRACE is off)";
    if (num_cuda_devices() == 0) GTEST_SKIP() << "no CUDA device";
  }

  static LayerConfig config() {
    LayerConfig config;
    config.backend = Backend::cuda;
    config.shape = {.max_tokens = 300,
                    .hidden_dim = 512,
                    .intermediate_dim = 384,
                    .num_experts = 8,
                    .top_k = 2};
    config.saved_row_capacity = 2 * 300 * 2;  // all rows: no launches for those beyond
    config.num_sms = kNumSms;
    return config;
  }
  static std::vector<std::vector<std::int32_t>> ids(const LayerConfig& of = config()) {
    return bench::routing_ids(bench::Routing::uniform, of.shape, of.shape.max_tokens, kNumRanks, 1);
  }

  /// Units of 16 rows of the rank's experts.
  static int num_units(int rank) {
    std::vector<int> rows_E(config().shape.num_experts);
    for (const auto& ids_TK : ids()) {
      for (const std::int32_t expert : ids_TK) ++rows_E[expert];
    }
    int units = 0;
    for (int expert = rank * 4; expert < rank * 4 + 4; ++expert)
      units += (rows_E[expert] + 15) / 16;
    return units;
  }

  static std::vector<std::string> names(const GpuTimeline& gpu) {
    std::vector<std::string> result;
    for (const KernelRun& kernel : gpu.kernels) result.push_back(kernel.name);
    return result;
  }

  /// Spans lie within their CTA, one after the other, and their waits within them.
  static void expect_in_order(const KernelRun& kernel, int num_blocks = kNumSms) {
    EXPECT_EQ(static_cast<int>(kernel.blocks.size()), num_blocks) << kernel.name;
    for (const Block& block : kernel.blocks) {
      for (const Role& role : block.roles) {
        EXPECT_EQ(role.num_lost, 0);
        double last_us = block.begin_us;
        for (const Span& span : role.spans) {
          constexpr double kTimerStepUs = 1.1;
          EXPECT_GE(span.begin_us, last_us - 1e-6) << kernel.name << " " << role.name;
          EXPECT_GE(span.end_us, span.begin_us);
          EXPECT_LE(span.end_us, block.end_us + kTimerStepUs);
          EXPECT_LE(span.waited_us, span.end_us - span.begin_us + 1e-6);
          EXPECT_LE(span.first_waited_us, span.waited_us + 1e-6);
          last_us = span.end_us;
        }
      }
    }
  }

  static int count(const KernelRun& kernel, Event event) {
    int spans = 0;
    for (const Block& block : kernel.blocks) {
      for (const Role& role : block.roles) {
        for (const Span& span : role.spans) spans += span.event == event ? 1 : 0;
      }
    }
    return spans;
  }

  /// One whose weight gradients begin beside dx, on some of the SMs. Each rank has two experts with
  /// more rows than that takes.
  static LayerConfig config_beside_dx() {
    LayerConfig config = Trace::config();
    config.shape.max_tokens = 1200;
    config.shape.intermediate_dim = 256;
    config.shape.num_experts = 4;
    config.saved_row_capacity = kNumRanks * config.shape.max_tokens * config.shape.top_k;
    config.weight_gradient_mode = WeightGradientMode::accumulate_fp32;
    return config;
  }

  /// Main loops of an expert's tiles, by either warpgroup.
  struct Multiplied {
    int num_tiles = 0;
    int num_units = 0;  ///< of 16 lines of the gradient
  };
  static std::vector<Multiplied> multiplied_by_expert(const KernelRun& kernel, int num_experts) {
    std::vector<Multiplied> result(num_experts);
    for (const Block& block : kernel.blocks) {
      for (const Role& role : block.roles) {
        for (const Span& span : role.spans) {
          if (span.event != Event::main_loop) continue;
          ++result.at(span.group).num_tiles;
          result.at(span.group).num_units += span.num_units;
        }
      }
    }
    return result;
  }

  /// Units multiplied by one math warpgroup, or, where they take turns, by both.
  static int num_multiplied(const KernelRun& kernel) {
    int units = 0;
    for (const Block& block : kernel.blocks) {
      for (const Role& role : block.roles) {
        if (role.name != "math 0" && (role.name != "math 1" || kernel.name != "p")) continue;
        for (const Span& span : role.spans) {
          if (span.event == Event::main_loop) units += span.num_units;
        }
      }
    }
    return units;
  }
};

TEST_F(Trace, ForwardRecordsEveryTile) {
  const std::vector<GpuTimeline> gpus = record_pass(config(), ids(), Pass::forward);
  ASSERT_EQ(gpus.size(), 2U);
  for (const GpuTimeline& gpu : gpus) {
    ASSERT_EQ(names(gpu), (std::vector<std::string>{"gate_up", "down"}));
    for (const KernelRun& kernel : gpu.kernels) expect_in_order(kernel);
    // Of 128 channels of gate and up, of 256 of hidden.
    EXPECT_EQ(num_multiplied(gpu.kernels[0]), num_units(gpu.rank) * 3);
    EXPECT_EQ(num_multiplied(gpu.kernels[1]), num_units(gpu.rank) * 2);
    EXPECT_EQ(gpu.stages.back().name, "reduce");
  }
}

TEST_F(Trace, BackwardRecordsEveryTile) {
  const std::vector<GpuTimeline> gpus = record_pass(config(), ids(), Pass::backward);
  for (const GpuTimeline& gpu : gpus) {
    ASSERT_EQ(names(gpu), (std::vector<std::string>{"p", "dx", "weight_gradients"}));
    for (const KernelRun& kernel : gpu.kernels) expect_in_order(kernel);
    EXPECT_EQ(num_multiplied(gpu.kernels[0]), num_units(gpu.rank) * 3);
    EXPECT_EQ(num_multiplied(gpu.kernels[1]), num_units(gpu.rank) * 2);
    // dy of each token that the rank needs under p, its x under the gradients of down; every block
    // waits once for all of x.
    EXPECT_GT(count(gpu.kernels[0], Event::pulls), 0);
    EXPECT_EQ(count(gpu.kernels[2], Event::pulls), count(gpu.kernels[0], Event::pulls));
    EXPECT_LE(count(gpu.kernels[2], Event::awaits_rows), kNumSms);
    EXPECT_EQ(count(gpu.kernels[2], Event::awaits_gradients), kNumSms);
    EXPECT_LE(count(gpu.kernels[2], Event::reduces), 300);  // others were left to a later kernel
    for (const KernelRun& kernel : gpu.kernels) {
      const KernelSummary summary = summarize(kernel, gpu.rank);
      EXPECT_NEAR(summary.main_loops + summary.start + summary.awaits_rows + summary.epilogue +
                      summary.awaits_operands + summary.rows_beside + summary.tail,
                  1.0, 0.01);
      EXPECT_GT(summary.main_loops, 0.0);
    }
  }
}

/// Where weight gradients begin beside dx, two launches share their tiles.
TEST_F(Trace, EachTileOfAWeightGradientIsMultipliedOnceByOneOfTwoLaunches) {
  const LayerConfig config = config_beside_dx();
  const schedule::SmSplit sms =
      schedule::split_sms(kNumSms, static_cast<int>(config.shape.max_tokens * kNumRanks *
                                                    config.shape.top_k / config.shape.num_experts));
  ASSERT_GT(sms.gradients, 0);
  // Of each expert's gradients (rows x channels) 512 x 256, 256 x 512 and 256 x 512: tiles of at
  // most three blocks of 64 rows, cut evenly, and of 128 channels.
  constexpr int kUnitsPerBlock = 4;
  const auto tiles_of = [](int num_blocks, int num_channel_tiles) {
    const int num_line_tiles = (num_blocks + 2) / 3;
    return std::pair(num_line_tiles * num_channel_tiles,
                     num_blocks * kUnitsPerBlock * num_channel_tiles);
  };
  Multiplied wanted;
  for (const auto& [tiles, units] : {tiles_of(8, 2), tiles_of(4, 4), tiles_of(4, 4)}) {
    wanted.num_tiles += tiles;
    wanted.num_units += units;
  }
  const int num_experts = config.shape.num_experts / kNumRanks;
  for (const GpuTimeline& gpu : record_pass(config, ids(config), Pass::backward)) {
    ASSERT_EQ(names(gpu),
              (std::vector<std::string>{"p", "dx", "weight_gradients", "weight_gradients"}));
    expect_in_order(gpu.kernels[0]);
    expect_in_order(gpu.kernels[1], sms.dx);
    expect_in_order(gpu.kernels[2], sms.gradients);
    expect_in_order(gpu.kernels[3], sms.dx);
    const auto beside_dx = multiplied_by_expert(gpu.kernels[2], num_experts);
    const auto behind_dx = multiplied_by_expert(gpu.kernels[3], num_experts);
    for (int expert = 0; expert < num_experts; ++expert) {
      EXPECT_EQ(beside_dx[expert].num_tiles + behind_dx[expert].num_tiles, wanted.num_tiles);
      EXPECT_EQ(beside_dx[expert].num_units + behind_dx[expert].num_units, wanted.num_units);
    }
    EXPECT_GT(beside_dx[0].num_tiles, 0);
    EXPECT_LT(gpu.kernels[2].begin_us(), gpu.kernels[1].end_us()) << "not beside dx";
  }
}

}  // namespace
}  // namespace megamoe::timeline
