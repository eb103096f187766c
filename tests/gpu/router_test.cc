// CudaRouter's forward, loads and balancing against the CPU's router and the fp64 oracle.
#include <gtest/gtest.h>

#include <cfloat>
#include <set>

#include "gpu/gpu_test.h"
#include "gpu/router_device.h"

namespace megamoe::testing {
namespace {

class CudaRouting : public GpuTest {};

/// The ids of each token are different experts that exist.
void expect_distinct(const RouterBatch& batch, const std::vector<std::int32_t>& ids_TK) {
  for (std::int64_t t = 0; t < batch.num_tokens; ++t) {
    const auto first = ids_TK.begin() + t * batch.num_slots;
    const std::set<std::int32_t> ids(first, first + batch.num_slots);
    ASSERT_EQ(static_cast<std::int64_t>(ids.size()), batch.num_slots) << "token " << t;
    ASSERT_GE(*ids.begin(), 0) << "token " << t;
    ASSERT_LT(*ids.rbegin(), batch.config.num_experts) << "token " << t;
  }
}

void expect_right_weights(const RouterBatch& batch, const RouterResults& device) {
  const std::vector<double> expected = verify::routing_weights(make_oracle(batch), device.ids_TK);
  ASSERT_EQ(expected.size(), device.weights_TK.size());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const auto actual = static_cast<double>(device.weights_TK[i]);
    if (device.ids_TK[i] < 0) {
      ASSERT_EQ(actual, 0.0) << "slot " << i;
    } else {
      ASSERT_LE(std::abs(actual - expected[i]), kScoreError * expected[i] + 1e-35) << "slot " << i;
    }
  }
}

/// Counts are exact; scores are rounded each on its own.
void expect_right_load(const RouterBatch& batch, const RouterResults& device) {
  RouterBatch same_ids = batch;
  same_ids.ids_are_forced = true;
  same_ids.forced_TK = device.ids_TK;
  const RouterResults cpu = run_on_cpu(same_ids);
  const std::int64_t experts = batch.config.num_experts;
  for (std::int64_t j = 0; j < experts; ++j) {
    ASSERT_EQ(device.load[j], cpu.load[j]) << "count of expert " << j;
    // The CPU's scores are sums one by one.
    const double tolerance = kScoreError + static_cast<double>(experts) * 0x1p-24;
    ASSERT_LE(std::abs(device.load[experts + j] - cpu.load[experts + j]),
              tolerance * cpu.load[experts + j] + 1e-35)
        << "scores of expert " << j;
  }
  ASSERT_EQ(device.load[2 * experts], static_cast<double>(batch.num_tokens));
}

TEST_F(CudaRouting, EveryScoreNormAndDtypeAgreesWithTheOracle) {
  unsigned seed = 1;
  for (const RouterCase& c : all_router_cases()) {
    SCOPED_TRACE(name_of(c));
    const RouterBatch batch = make_batch(c.config, c.dtype, c.num_tokens, Logits::normal, ++seed);
    const RouterResults device = run_on_device(batch);
    expect_distinct(batch, device.ids_TK);
    EXPECT_LE(verify::selection_regret(make_oracle(batch), device.ids_TK), kScoreError);
    expect_right_weights(batch, device);
    expect_right_load(batch, device);
    if (::testing::Test::HasFailure()) return;
  }
}

TEST_F(CudaRouting, ForcedIdsMayRepeatAndBeEmpty) {
  unsigned seed = 1000;
  for (const RouterCase& c : all_router_cases()) {
    SCOPED_TRACE(name_of(c));
    RouterBatch batch = make_batch(c.config, c.dtype, c.num_tokens, Logits::normal, ++seed);
    batch.num_slots = 7;  // more than there are experts, too
    batch.d_weights_TK.resize(static_cast<std::size_t>(7 * c.num_tokens), 0.5F);
    force_ids(batch, seed);
    const RouterResults device = run_on_device(batch);
    EXPECT_EQ(device.ids_TK, batch.forced_TK);
    expect_right_weights(batch, device);
    expect_right_load(batch, device);
    if (::testing::Test::HasFailure()) return;
  }
}

TEST_F(CudaRouting, IdsEqualTheCpuWithTiesAndGroups) {
  constexpr auto kSoftmax = ScoreFunction::softmax;
  constexpr auto kSigmoid = ScoreFunction::sigmoid;
  constexpr auto kPlain = WeightNorm::none;
  constexpr auto kSumToOne = WeightNorm::sum_to_one;
  for (const RouterConfig& config : {
           router_config(128, 8, kSoftmax, kSumToOne),
           router_config(60, 4, kSoftmax, kPlain),
           router_config(8, 2, kSigmoid, kSumToOne),
           router_config(512, 16, kSoftmax, kSumToOne),
           router_config(256, 8, kSigmoid, kSumToOne, 8, 4),
           router_config(256, 8, kSoftmax, kPlain, 8, 1),
           router_config(512, 16, kSoftmax, kSumToOne, 32, 7),
           router_config(96, 6, kSoftmax, kPlain, 3, 2),
       }) {
    for (const DType dtype : {DType::fp32, DType::bf16}) {
      for (const std::int64_t tokens : {1, 7, 257, 600}) {
        SCOPED_TRACE(name_of({config, dtype, tokens}) + ", groups " +
                     std::to_string(config.num_groups));
        const RouterBatch batch = make_batch(config, dtype, tokens, Logits::steps, 17);
        const RouterResults device = run_on_device(batch);
        EXPECT_EQ(device.ids_TK, run_on_cpu(batch).ids_TK);
        expect_right_weights(batch, device);
      }
    }
  }
}

TEST_F(CudaRouting, EqualLogitsGoToTheLowestIds) {
  for (const ScoreFunction function : {ScoreFunction::softmax, ScoreFunction::sigmoid}) {
    const RouterConfig config = router_config(200, 16, function, WeightNorm::sum_to_one);
    RouterBatch batch = make_batch(config, DType::fp32, 257, Logits::steps, 3);
    batch.logits_TE.assign(batch.logits_TE.size(), -1.5F);
    const RouterResults device = run_on_device(batch);
    for (std::size_t i = 0; i < device.ids_TK.size(); ++i) {
      ASSERT_EQ(device.ids_TK[i], static_cast<std::int32_t>(i % 16));
      ASSERT_EQ(device.weights_TK[i], device.weights_TK[0]);
    }
  }
}

/// Groups of one expert have its score alone.
TEST_F(CudaRouting, GroupsOfOneExpert) {
  const RouterConfig config = router_config(32, 4, ScoreFunction::sigmoid, WeightNorm::none, 32, 9);
  const RouterBatch batch = make_batch(config, DType::fp32, 100, Logits::steps, 4);
  EXPECT_EQ(run_on_device(batch).ids_TK, run_on_cpu(batch).ids_TK);
}

/// Sums of two biases that overflow, in either direction and in the lower or the higher groups,
/// still rank as on the CPU: a group whose sum is -infinity is no other than the last.
TEST_F(CudaRouting, GroupsWhoseBiasesOverflow) {
  const RouterConfig config = router_config(8, 6, ScoreFunction::sigmoid, WeightNorm::none, 4, 3);
  for (const float size : {-3e38F, 3e38F}) {
    for (const std::size_t first : {0, 4}) {
      SCOPED_TRACE(std::to_string(size) + " from expert " + std::to_string(first));
      RouterBatch batch = make_batch(config, DType::fp32, 9, Logits::steps, 5);
      batch.bias_E.assign(8, 0.0F);
      std::fill_n(batch.bias_E.begin() + static_cast<std::ptrdiff_t>(first), 4, size);
      const RouterResults device = run_on_device(batch);
      EXPECT_EQ(device.ids_TK, run_on_cpu(batch).ids_TK);
      expect_distinct(batch, device.ids_TK);
      for (const std::int32_t id : device.ids_TK) {
        // The two that overflow are equal, so the lower one is taken.
        if (size < 0) {
          EXPECT_NE(id / 2, static_cast<std::int32_t>(first) / 2 + 1);
        }
      }
    }
  }
}

TEST_F(CudaRouting, Bf16LogitsGiveTheBitsOfTheirFp32Values) {
  const RouterConfig config = router_config(128, 8, ScoreFunction::softmax, WeightNorm::sum_to_one);
  RouterBatch batch = make_batch(config, DType::bf16, 65, Logits::normal, 6);
  const RouterResults from_bf16 = run_on_device(batch);
  batch.dtype = DType::fp32;
  const RouterResults from_fp32 = run_on_device(batch);
  EXPECT_EQ(from_bf16.ids_TK, from_fp32.ids_TK);
  EXPECT_TRUE(same_bits(from_bf16.weights_TK, from_fp32.weights_TK));
  EXPECT_TRUE(same_bits(from_bf16.load, from_fp32.load));
  EXPECT_TRUE(same_bits(from_bf16.d_logits_TE, from_fp32.d_logits_TE));
}

/// As a recompute does; in place, too.
TEST_F(CudaRouting, ForcedIdsOfAForwardGiveItsWeights) {
  const RouterConfig config =
      router_config(256, 8, ScoreFunction::sigmoid, WeightNorm::sum_to_one, 8, 4);
  RouterBatch batch = make_batch(config, DType::bf16, 257, Logits::normal, 7);
  CudaRouter router(config, 0);
  DeviceRouting routing(batch);
  router.forward(routing.inputs(), routing.outputs());
  router.check();
  const std::vector<float> weights = routing.weights.download();
  const std::vector<std::int32_t> ids = routing.ids.download();
  routing.weights.poison();
  RouterInputs again = routing.inputs();
  again.forced_ids = routing.ids.view();
  router.forward(again, routing.outputs());
  router.check();
  EXPECT_TRUE(same_bits(routing.weights.download(), weights));
  EXPECT_EQ(routing.ids.download(), ids);
}

TEST_F(CudaRouting, LoadsOfCallsAddUpAndBecomeTheAuxiliaryLoss) {
  for (const ScoreFunction function : {ScoreFunction::softmax, ScoreFunction::sigmoid}) {
    RouterConfig config = router_config(60, 4, function, WeightNorm::none);
    config.aux_loss_alpha = 0.1F;
    const RouterBatch batch = make_batch(config, DType::fp32, 2000, Logits::normal, 8);
    CudaRouter router(config, 0);
    DeviceRouting routing(batch);
    router.forward(routing.inputs(), routing.outputs());
    router.add_load(routing.logits(), routing.ids.view(), routing.load.vector_view());
    const std::vector<double> once = routing.load.download();
    router.add_load(routing.logits(), routing.ids.view(), routing.load.vector_view());
    router.aux_loss(routing.load.vector_view(), routing.aux_loss.vector_view());
    router.check();
    const std::vector<double> twice = routing.load.download();
    RouterLoad load(60);
    for (std::size_t i = 0; i < once.size(); ++i) {
      EXPECT_EQ(twice[i], 2 * once[i]);
      load.values()[i] = twice[i];
    }
    const double expected = Router(config).aux_loss(load);
    EXPECT_NEAR(static_cast<double>(routing.aux_loss.download()[0]), expected, 0x1p-23 * expected);
    EXPECT_GE(expected, 0.09);
  }
}

TEST_F(CudaRouting, BiasesMoveAsOnTheCpu) {
  for (const std::int64_t experts : {3, 60, 512}) {
    const RouterConfig config = router_config(experts, 1, ScoreFunction::sigmoid, WeightNorm::none);
    CudaRouter router(config, 0);
    std::mt19937 random(static_cast<unsigned>(experts));
    RouterLoad load(experts);
    std::vector<float> bias(static_cast<std::size_t>(experts));
    for (std::int64_t j = 0; j < experts; ++j) {
      load.values()[j] = static_cast<double>(random() % 3);  // the mean is often met exactly
      bias[j] = static_cast<float>(random() % 100) * 0.01F;
    }
    DeviceMatrix<double> device_load(1, 2 * experts + 1);
    DeviceMatrix<float> device_bias(1, experts, bias);
    for (const bool all_equal : {false, true}) {
      if (all_equal) std::fill_n(load.values().begin(), experts, 7.0);
      device_load.upload({load.values().begin(), load.values().end()});
      router.update_selection_bias(device_load.vector_view(), 0.003F, device_bias.vector_view());
      update_selection_bias(load, 0.003F, tensor_view(bias.data(), {experts}));
      EXPECT_TRUE(same_bits(device_bias.download(), bias)) << experts;
    }
    router.check();
  }
}

/// All on the device: a router that prefers low ids is balanced by its biases.
TEST_F(CudaRouting, BiasesBalanceASkewedRouter) {
  const RouterConfig config = router_config(8, 2, ScoreFunction::sigmoid, WeightNorm::none);
  RouterBatch batch = make_batch(config, DType::fp32, 512, Logits::normal, 9);
  for (std::size_t i = 0; i < batch.logits_TE.size(); ++i) {
    batch.logits_TE[i] = 0.5F * batch.logits_TE[i] - 0.25F * static_cast<float>(i % 8);
  }
  batch.bias_E.assign(8, 0.0F);
  CudaRouter router(config, 0);
  DeviceRouting routing(batch);
  const auto step = [&] {
    routing.load.upload(std::vector<double>(17, 0.0));
    router.forward(routing.inputs(), routing.outputs());
    router.add_load(routing.logits(), routing.ids.view(), routing.load.vector_view());
    router.update_selection_bias(routing.load.vector_view(), 0.01F, routing.bias.vector_view());
  };
  const auto max_over_mean = [&] {
    RouterLoad load(8);
    const std::vector<double> values = routing.load.download();
    std::copy(values.begin(), values.end(), load.values().begin());
    return load.max_over_mean();
  };
  step();
  EXPECT_GT(max_over_mean(), 1.5);
  for (int i = 0; i < 200; ++i) step();
  EXPECT_LT(max_over_mean(), 1.2);
  router.check();
}

}  // namespace
}  // namespace megamoe::testing
