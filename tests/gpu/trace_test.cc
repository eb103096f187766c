// What kernels of a build with MEGAMOE_TRACE record; skipped in other builds, and without a GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "bench/routing.h"
#include "megamoe/cuda.h"
#include "trace/record.h"
#include "trace/summary.h"

namespace megamoe::timeline {
namespace {

constexpr int kNumRanks = 2;

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
    config.num_sms = 32;                      // two ranks may share the device
    return config;
  }
  static std::vector<std::vector<std::int32_t>> ids() {
    return bench::routing_ids(bench::Routing::uniform, config().shape, 300, kNumRanks, 1);
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
  static void expect_in_order(const KernelRun& kernel) {
    EXPECT_EQ(kernel.blocks.size(), 32U) << kernel.name;
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
    EXPECT_LE(count(gpu.kernels[2], Event::awaits_rows), 32);
    EXPECT_EQ(count(gpu.kernels[2], Event::awaits_gradients), 32);
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

}  // namespace
}  // namespace megamoe::timeline
