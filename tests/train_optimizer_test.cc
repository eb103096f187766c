// AdamW, its schedule and clipping against values computed by hand; sampling of a byte.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "megamoe/communicator.h"
#include "train/backend.h"
#include "train/optimizer.h"
#include "train/sampler.h"
#include "train/sharding.h"

namespace megamoe::trainer {
namespace {

OptimizerOptions plain_options() {
  OptimizerOptions options;
  options.learning_rate = 0.1;
  options.weight_decay = 0.5;
  options.beta1 = 0.9;
  options.beta2 = 0.99;
  options.epsilon = 1e-8;
  options.warmup_steps = 0;
  options.decay_steps = 1000000000;  // the rate is constant for this test's purposes
  return options;
}

TEST(TrainOptimizer, TwoStepsOfAdamWByHand) {
  const auto ranks = make_thread_communicators(1);
  const auto backend = make_backend(Backend::cpu, *ranks[0]);
  ParameterGroup group;
  const ParameterSlice weight = group.add("weight", 1, WeightDecay::applies);
  const ParameterSlice norm = group.add("norm", 1, WeightDecay::none);
  group.allocate(*backend);
  *group.values(weight) = 2.0F;
  *group.values(norm) = 2.0F;
  // Step 1, gradient 4 * 0.5: m = 0.1 * 2, v = 0.01 * 4; corrected they are 2 and 4; their ratio 1.
  *group.gradients(weight) = 4.0F;
  *group.gradients(norm) = 4.0F;
  adamw_step(backend->operations(), group, plain_options(), 1, 0.5);
  EXPECT_NEAR(*group.values(weight), 2.0 - 0.1 * (1.0 + 0.5 * 2.0), 1e-6);
  EXPECT_NEAR(*group.values(norm), 2.0 - 0.1, 1e-6);
  EXPECT_NEAR(group.first_moments()[0], 0.2, 1e-7);
  EXPECT_NEAR(group.second_moments()[0], 0.04, 1e-7);
  // Step 2, gradient -1: m = 0.9 * 0.2 - 0.1 = 0.08, v = 0.99 * 0.04 + 0.01 = 0.0496;
  // corrected m = 0.08 / 0.19, v = 0.0496 / 0.0199.
  *group.gradients(weight) = -1.0F;
  *group.gradients(norm) = -1.0F;
  adamw_step(backend->operations(), group, plain_options(), 2, 1.0);
  const double update = (0.08 / 0.19) / std::sqrt(0.0496 / 0.0199);
  EXPECT_NEAR(*group.values(weight), 1.8 - 0.1 * (update + 0.5 * 1.8), 1e-6);
  EXPECT_NEAR(*group.values(norm), 1.9 - 0.1 * update, 1e-6);
}

TEST(TrainOptimizer, RateRisesThenFallsToATenthAndStays) {
  OptimizerOptions options;
  options.learning_rate = 1.0;
  options.warmup_steps = 10;
  options.decay_steps = 110;
  EXPECT_DOUBLE_EQ(learning_rate(options, 1), 0.1);
  EXPECT_DOUBLE_EQ(learning_rate(options, 10), 1.0);
  EXPECT_NEAR(learning_rate(options, 60), 0.55, 1e-12);  // half way of the cosine
  EXPECT_DOUBLE_EQ(learning_rate(options, 110), 0.1);
  EXPECT_DOUBLE_EQ(learning_rate(options, 100000), 0.1);
  options.warmup_steps = 0;
  EXPECT_NEAR(learning_rate(options, 1), 1.0, 1e-3);
  options.warmup_steps = 200;  // longer than the decay: rises, then is at the lowest at once
  EXPECT_DOUBLE_EQ(learning_rate(options, 150), 0.75);
  EXPECT_DOUBLE_EQ(learning_rate(options, 201), 0.1);
}

TEST(TrainOptimizer, NormCountsSharedOnceAndExpertsOfEveryRank) {
  run_ranks(3, [](Communicator& communicator) {
    const auto backend = make_backend(Backend::cpu, communicator);
    ParameterGroup shared;
    ParameterGroup experts;
    const ParameterSlice a = shared.add("a", 1, WeightDecay::applies);
    const ParameterSlice b = experts.add("b", 4, WeightDecay::applies);  // of two experts
    shared.allocate(*backend);
    experts.allocate(*backend);
    *shared.gradients(a) = 3.0F;
    experts.gradients(b)[1] = static_cast<float>(communicator.rank());  // 0, 1, 2
    experts.gradients(b)[2] = 1.0F;
    GradientNorm norm(6, *backend);
    EXPECT_DOUBLE_EQ(norm(shared, experts), std::sqrt(9.0 + 5.0 + 3.0));
  });
}

TEST(TrainOptimizer, ClipsOnlyWhatIsTooLong) {
  EXPECT_DOUBLE_EQ(clip_factor(0.5, 1.0), 1.0);
  EXPECT_DOUBLE_EQ(clip_factor(4.0, 1.0), 0.25);
  EXPECT_DOUBLE_EQ(clip_factor(0.0, 1.0), 1.0);
}

TEST(TrainSharding, ShardsCoverEveryItemOnceAndDoNotDependOnTheRanks) {
  for (const std::int64_t count : {0, 1, 5, 8, 256, 1001}) {
    for (const int num_ranks : {1, 2, 3, 5, 8, 16}) {
      std::int64_t next = 0;
      std::int64_t shard = 0;
      for (int rank = 0; rank < num_ranks; ++rank) {
        const Share items = items_of_rank(count, rank, num_ranks);
        EXPECT_EQ(items.first, next);
        EXPECT_LE(items.count, max_items_of_rank(count, num_ranks));
        for (std::int64_t i = 0; i < shards_of_rank(rank, num_ranks).count; ++i, ++shard) {
          const Share local = local_shard(count, rank, num_ranks, i);
          EXPECT_EQ(items.first + local.first, next);
          EXPECT_EQ(items.first + local.first, share_of(count, shard, kNumShards).first);
          next += local.count;
        }
        EXPECT_EQ(items.first + items.count, next);
      }
      EXPECT_EQ(shard, kNumShards);
      EXPECT_EQ(next, count);
    }
  }
  EXPECT_EQ(items_of_rank(1, 0, 4).count, 1);  // where generation has its token
}

TEST(TrainSampler, ChoosesByTemperature) {
  std::vector<float> logits(256, -100.0F);
  logits[65] = 1.0F;
  logits[66] = 1.0F;
  EXPECT_EQ(choose_byte(logits, 0.0, 0.99), 65);  // the lower of equals
  EXPECT_EQ(choose_byte(logits, 1.0, 0.49), 65);
  EXPECT_EQ(choose_byte(logits, 1.0, 0.51), 66);
  logits[66] = 0.0F;  // odds e : 1 at temperature 1, e^10 : 1 at 0.1
  EXPECT_EQ(choose_byte(logits, 1.0, 0.75), 66);
  EXPECT_EQ(choose_byte(logits, 0.1, 0.999), 65);
}

}  // namespace
}  // namespace megamoe::trainer
