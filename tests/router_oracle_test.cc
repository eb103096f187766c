// The fp64 router oracle: selection, weights, regret.
#include "verify/router_oracle.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

namespace megamoe::verify {
namespace {

/// One token whose logits are `logits`.
RouterOracle router_with_logits(const std::vector<double>& logits, std::int64_t top_k) {
  RouterOracle router;
  router.num_tokens = 1;
  router.hidden_dim = 1;
  router.num_experts = static_cast<std::int64_t>(logits.size());
  router.top_k = top_k;
  router.x_TH = {1.0};
  router.weight_EH = logits;
  return router;
}

TEST(RouterOracle, TakesTheHighestScoresAndBreaksTiesToTheLowerId) {
  EXPECT_EQ(select_experts(router_with_logits({0.1, 3.0, -2.0, 3.0}, 3)),
            (std::vector<std::int32_t>{1, 3, 0}));
  EXPECT_EQ(select_experts(router_with_logits({1.0, 1.0, 1.0, 1.0}, 2)),
            (std::vector<std::int32_t>{0, 1}));
}

TEST(RouterOracle, BiasSelectsButDoesNotWeigh) {
  RouterOracle router = router_with_logits({std::log(1.0), std::log(2.0), std::log(5.0)}, 1);
  router.selection_bias_E = {10.0, 0.0, 0.0};
  EXPECT_EQ(select_experts(router), (std::vector<std::int32_t>{0}));
  EXPECT_DOUBLE_EQ(routing_weights(router, {0})[0], 0.125);
}

TEST(RouterOracle, WeightsOfEmptyAndDoubledSlots) {
  RouterOracle router = router_with_logits({std::log(1.0), std::log(2.0), std::log(5.0)}, 4);
  router.scale = 2.0;
  const std::vector<double> plain = routing_weights(router, {2, -1, 1, 2});
  EXPECT_DOUBLE_EQ(plain[0], 1.25);
  EXPECT_EQ(plain[1], 0.0);
  EXPECT_DOUBLE_EQ(plain[2], 0.5);
  EXPECT_DOUBLE_EQ(plain[3], 1.25);
  router.renormalise = RouterOracle::Renormalise::on;
  const std::vector<double> renormalised = routing_weights(router, {2, -1, 1, 2});
  EXPECT_DOUBLE_EQ(std::accumulate(renormalised.begin(), renormalised.end(), 0.0), 2.0);
  EXPECT_DOUBLE_EQ(renormalised[0], 2.0 * 5 / 12);
}

TEST(RouterOracle, SigmoidScoresStandAlone) {
  RouterOracle router = router_with_logits({0.0, 2.0}, 2);
  router.scores = RouterOracle::Scores::sigmoid;
  EXPECT_DOUBLE_EQ(router_scores(router)[0], 0.5);
  EXPECT_DOUBLE_EQ(router_scores(router)[1], 1.0 / (1.0 + std::exp(-2.0)));
}

TEST(RouterOracle, RegretMeasuresAWrongSelection) {
  const RouterOracle router =
      router_with_logits({std::log(1.0), std::log(2.0), std::log(5.0), std::log(2.0)}, 2);
  EXPECT_EQ(selection_regret(router, {2, 1}), 0.0);
  EXPECT_EQ(selection_regret(router, {3, 2}), 0.0);  // a tie, and another order
  EXPECT_DOUBLE_EQ(selection_regret(router, {2, 0}), 0.1);
}

}  // namespace
}  // namespace megamoe::verify
