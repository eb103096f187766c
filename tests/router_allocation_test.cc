// A training step's router calls allocate nothing once the buffers have grown.
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "count_allocations.h"
#include "megamoe/router.h"
#include "router_fixture.h"
#include "router_naive.h"

namespace megamoe {
namespace {

TEST(RouterAllocation, NoneInSteadyState) {
  constexpr std::int64_t kTokens = 33;
  constexpr std::int64_t kHidden = 8;
  std::mt19937 generator(31);
  for (RouterConfig config : testing::all_router_configs()) {
    config.aux_loss_alpha = 0.1F;
    const std::int64_t experts = config.num_experts;
    const std::vector<bf16> x =
        testing::to_bf16_vector(testing::random_floats(generator, kTokens * kHidden, -1, 1));
    const std::vector<float> weight = testing::random_floats(generator, experts * kHidden, -1, 1);
    std::vector<float> bias(static_cast<std::size_t>(experts), 0.0F);
    std::vector<std::int32_t> ids(static_cast<std::size_t>(kTokens * config.top_k));
    std::vector<float> weights(ids.size());
    std::vector<float> d_x(static_cast<std::size_t>(kTokens * kHidden));
    std::vector<float> d_weight(weight.size());
    Router router(config);
    RouterContext context;
    RouterLoad load(experts);
    const auto step = [&](std::int64_t tokens) {
      RouterInputs inputs;
      inputs.x = tensor_view(x.data(), {tokens, kHidden});
      inputs.router_weight = tensor_view(weight.data(), {experts, kHidden});
      inputs.selection_bias = tensor_view(static_cast<const float*>(bias.data()), {experts});
      router.forward(inputs,
                     {tensor_view(ids.data(), {tokens, config.top_k}),
                      tensor_view(weights.data(), {tokens, config.top_k})},
                     context);
      load.clear();
      router.add_load(context, load);
      RouterBackwardInputs backward_inputs;
      backward_inputs.d_weights =
          tensor_view(static_cast<const float*>(weights.data()), {tokens, config.top_k});
      backward_inputs.x = inputs.x;
      backward_inputs.router_weight = inputs.router_weight;
      backward_inputs.global_load = &load;
      RouterBackwardOutputs outputs;
      outputs.d_x = tensor_view(d_x.data(), {tokens, kHidden});
      outputs.d_router_weight = tensor_view(d_weight.data(), {experts, kHidden});
      router.backward(context, backward_inputs, outputs);
      update_selection_bias(load, 0.001F, tensor_view(bias.data(), {experts}));
      return router.aux_loss(load);
    };
    step(kTokens);
    const std::int64_t before = testing::num_allocations();
    for (const std::int64_t tokens : {kTokens, std::int64_t{1}, std::int64_t{0}, kTokens}) {
      step(tokens);
    }
    EXPECT_GT(before, 0);  // the counter works
    EXPECT_EQ(testing::num_allocations() - before, 0);
  }
}

}  // namespace
}  // namespace megamoe
